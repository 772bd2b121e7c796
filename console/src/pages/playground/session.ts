// What the playground remembers while the page is open: the choices, the conversations, a key.
import { store } from "../../state";
import { emptyAnswer, run, type Answer } from "./answer";
import { chatBody, completionBody, PLAIN, userMessage, type Message, type Sampling } from "./request";

export type Turn =
    | { by: "user"; text: string; images: string[] }
    | { by: "tool"; call: string; text: string }
    | { by: "model"; answer: Answer };

export interface Session {
    tab: string;
    /** One model, or two side by side. Empty means the first that fits. */
    models: string[];
    sampling: Sampling;
    /** One conversation for each model. */
    talks: Turn[][];
    prompt: string;
    /** What documents are ranked by. */
    question: string;
    /** Of a picture, for example 512x512. */
    size: string;
    recording: File | null;
    /** The answers of the completions tab. */
    texts: Answer[];
    isRunning: boolean;
    problem: string | null;
}

export const session = store<Session>({
    tab: "",
    models: [""],
    sampling: PLAIN,
    talks: [[]],
    prompt: "",
    question: "",
    size: "512x512",
    recording: null,
    texts: [],
    isRunning: false,
    problem: null,
});
/** Never stored, only sent with requests. */
export const key = store("");

let stopper = new AbortController();
/** Counts up when answers that still come are not wanted any more. */
let round = 0;

export function change(values: Partial<Session>): void {
    session.set({ ...session.get(), ...values });
}

export function stop(): void {
    stopper.abort();
}

export function clear(): void {
    stop();
    round += 1;
    change({ talks: session.get().models.map(() => []), texts: [], isRunning: false, problem: null });
}

export function messagesOf(turns: readonly Turn[]): Message[] {
    return turns.flatMap((turn): Message[] => {
        if (turn.by === "user") return [userMessage(turn.text, turn.images)];
        if (turn.by === "tool") return [{ role: "tool", tool_call_id: turn.call, content: turn.text }];
        const { text, tools, problem } = turn.answer;
        if (problem !== null && text === "" && tools.length === 0) return [];
        const calls = tools.map((tool) => ({
            id: tool.id,
            type: "function",
            function: { name: tool.name, arguments: tool.arguments },
        }));
        return [{ role: "assistant", content: text, ...(calls.length === 0 ? {} : { tool_calls: calls }) }];
    });
}

/** Sends the turns to every model at the same time; the first that can not be built is said, and nothing is sent. */
export async function sendChat(models: readonly string[], added: (i: number) => Turn[]): Promise<void> {
    const { talks, sampling } = session.get();
    const asked = models.map((_, i) => [...(talks[i] ?? []), ...added(i)]);
    await together(
        models.map((model, i) => () => chatBody(model, messagesOf(asked[i]!), sampling)),
        "v1/chat/completions",
        (answers) => ({ talks: asked.map((turns, i) => [...turns, { by: "model", answer: answers[i]! }]) }),
    );
}

export async function sendCompletion(models: readonly string[], prompt: string): Promise<void> {
    const { sampling } = session.get();
    await together(
        models.map((model) => () => completionBody(model, prompt, sampling)),
        "v1/completions",
        (answers) => ({ texts: answers }),
    );
}

async function together(
    builders: readonly (() => Record<string, unknown>)[],
    path: string,
    shown: (answers: Answer[]) => Partial<Session>,
): Promise<void> {
    let bodies: Record<string, unknown>[];
    try {
        bodies = builders.map((build) => build());
    } catch (error) {
        change({ problem: error instanceof Error ? error.message : String(error) });
        return;
    }
    stopper = new AbortController();
    const { signal } = stopper;
    const answers = bodies.map(() => emptyAnswer());
    const own = (round += 1);
    const show = (isRunning: boolean): void => {
        if (own === round) change({ ...shown([...answers]), isRunning });
    };
    change({ problem: null });
    show(true);
    await Promise.all(
        bodies.map((body, i) =>
            run(path, body, key.get(), signal, (answer) => {
                answers[i] = { ...answer };
                show(true);
            }),
        ),
    );
    show(false);
}
