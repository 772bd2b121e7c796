// Tries the deployment: what it answers, how fast, and how to ask the same from a program.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { plural } from "../format";
import { settings } from "../live";
import { useStore } from "../state";
import type { Kind, Model } from "../types";
import { Choice, Code, Empty, Section, Segments } from "../ui/parts";
import { Chat } from "./playground/chat";
import { Controls } from "./playground/controls";
import { Completion, Embedding, embeddingBody, Picture, pictureBody, Rerank } from "./playground/others";
import { asCurl, asPython, chatBody, completionBody, userMessage } from "./playground/request";
import { change, key, messagesOf, session, type Session } from "./playground/session";
import { Transcription } from "./playground/speech";

const TABS: readonly (readonly [tab: string, title: string, kinds: readonly Kind[]])[] = [
    ["chat", "Chat", ["chat"]],
    ["completions", "Completion", ["chat", "completions"]],
    ["embeddings", "Embeddings", ["embeddings"]],
    ["rerank", "Rerank", ["rerank"]],
    ["image", "Pictures", ["image"]],
    ["transcription", "Speech", ["transcription"]],
];

export function PlaygroundPage(): JSX.Element {
    const known = useStore(settings);
    const state = useStore(session);
    const all = known?.models ?? [];
    const tabs = TABS.filter(([, , kinds]) => all.some((model) => kinds.includes(model.kind)));
    if (tabs.length === 0) return <Empty>No model can answer yet.</Empty>;
    const [tab, , kinds] = tabs.find(([name]) => name === state.tab) ?? tabs[0]!;
    const fitting = all.filter((model) => kinds.includes(model.kind));
    const isText = tab === "chat" || tab === "completions";
    const models = (isText ? state.models : state.models.slice(0, 1)).map((name) =>
        fitting.some((model) => model.name === name) ? name : (fitting[0]?.name ?? ""),
    );
    return (
        <>
            <div class="bar-of">
                <Segments
                    label="What to try"
                    value={tab}
                    options={tabs.map(([name, title]) => [name, title] as const)}
                    onChoose={(name) => change({ tab: name })}
                />
            </div>
            <div class="playground">
                <Section title="Request">
                    <Models models={models} fitting={fitting} canCompare={isText} />
                    {isText ? <Controls isChat={tab === "chat"} /> : null}
                </Section>
                <Section title={tab === "chat" ? "Conversation" : "Answer"}>
                    {tab === "chat" ? <Chat models={models} /> : null}
                    {tab === "completions" ? <Completion models={models} /> : null}
                    {tab === "embeddings" ? <Embedding model={models[0]!} /> : null}
                    {tab === "rerank" ? <Rerank model={models[0]!} /> : null}
                    {tab === "transcription" ? <Transcription model={models[0]!} /> : null}
                    {tab === "image" ? <Picture model={models[0]!} /> : null}
                </Section>
            </div>
            {tab === "transcription" ? null : (
                <Programs tab={tab} model={models[0]!} state={state} url={known?.url ?? "http://127.0.0.1:8000"} />
            )}
        </>
    );
}

function Models({
    models,
    fitting,
    canCompare,
}: {
    models: readonly string[];
    fitting: readonly Model[];
    canCompare: boolean;
}): JSX.Element {
    const options = fitting.map((model) => [model.name, model.name] as const);
    const second = models[1];
    const choose = (first: string, other: string | undefined): void => {
        const { talks } = session.get();
        change({
            models: other === undefined ? [first] : [first, other],
            talks: other === undefined ? talks.slice(0, 1) : [talks[0] ?? [], talks[1] ?? []],
            texts: [],
        });
    };
    const hint = about(fitting.find((model) => model.name === models[0]));
    return (
        <div class="models">
            <Choice
                label="Model"
                value={models[0] ?? ""}
                options={options}
                onChoose={(name) => choose(name, second)}
                {...(hint === "" ? {} : { hint })}
            />
            {canCompare ? (
                <Choice
                    label="Beside it"
                    value={second ?? ""}
                    options={[["", "nothing"], ...options]}
                    onChoose={(name) => choose(models[0] ?? "", name === "" ? undefined : name)}
                />
            ) : null}
        </div>
    );
}

function about(model: Model | undefined): string {
    const base = model?.adapter_of ?? null;
    const context = model?.context ?? null;
    return [
        base === null ? null : `adapter of ${base}`,
        context === null ? null : `context: ${plural(context, "token")}`,
    ]
        .filter((fact) => fact !== null)
        .join(", ");
}

/** Returns the path and body of the request as it would be sent, or why it cannot be built. */
function requestOf(
    tab: string,
    model: string,
    { talks, sampling, prompt }: Session,
): [string, Record<string, unknown>] | string {
    try {
        if (tab === "chat") {
            const said = messagesOf((talks[0] ?? []).slice(0, lastQuestion(talks[0] ?? [])));
            return [
                "v1/chat/completions",
                chatBody(model, said.length === 0 ? [userMessage("Hello!", [])] : said, sampling),
            ];
        }
        if (tab === "completions")
            return ["v1/completions", completionBody(model, prompt || "Once upon a time", sampling)];
        if (tab === "embeddings") return ["v1/embeddings", embeddingBody(model, prompt || "A text")];
        if (tab === "rerank")
            return ["v1/rerank", { model, query: "A question", documents: (prompt || "A document").split("\n") }];
        return ["v1/images/generations", pictureBody(model, prompt || "A red square", "512x512")];
    } catch (error) {
        return error instanceof Error ? error.message : String(error);
    }
}

function lastQuestion(turns: Session["talks"][number]): number {
    for (let i = turns.length; i > 0; i -= 1) if (turns[i - 1]!.by !== "model") return i;
    return 0;
}

function Programs({
    tab,
    model,
    state,
    url,
}: {
    tab: string;
    model: string;
    state: Session;
    url: string;
}): JSX.Element {
    const [form, setForm] = useState("curl");
    const hasKey = useStore(key) !== "";
    const request = requestOf(tab, model, state);
    if (typeof request === "string")
        return (
            <Section title="The same request">
                <Empty>{request}</Empty>
            </Section>
        );
    const [path, body] = request;
    const text = form === "curl" ? asCurl(url, path, body, hasKey) : asPython(url, path, body, hasKey);
    return (
        <Section
            title="The same request"
            aside={
                <Segments
                    label="Form"
                    value={form}
                    options={[
                        ["curl", "curl"],
                        ["python", "Python"],
                    ]}
                    onChoose={setForm}
                />
            }
        >
            <Code label={form === "curl" ? "Request with curl" : "Request with Python"} text={text} />
        </Section>
    );
}
