// Tries the deployment: what it answers, how fast, and how to ask the same from a program.
import type { JSX } from "preact";
import { plural } from "../format";
import { settings } from "../live";
import { useStore } from "../state";
import type { Kind, Model } from "../types";
import { Choice, Empty, Section, Segments } from "../ui/parts";
import { Chat } from "./playground/chat";
import { Controls } from "./playground/controls";
import { Completion, Embedding, Picture, Rerank } from "./playground/others";
import { Programs } from "./playground/same";
import { change, session } from "./playground/session";
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
                    <Models models={models} fitting={fitting} canCompare={isText} isFixed={isText && state.isRunning} />
                    {isText ? <Controls isChat={tab === "chat"} /> : null}
                </Section>
                <Section title={tab === "chat" ? "Conversation" : "Answer"}>
                    {tab === "chat" ? <Chat models={models} /> : null}
                    {tab === "completions" ? <Completion models={models} /> : null}
                    {tab === "embeddings" ? <Embedding key={models[0]} model={models[0]!} /> : null}
                    {tab === "rerank" ? <Rerank key={models[0]} model={models[0]!} /> : null}
                    {tab === "transcription" ? <Transcription key={models[0]} model={models[0]!} /> : null}
                    {tab === "image" ? <Picture key={models[0]} model={models[0]!} /> : null}
                </Section>
            </div>
            <Programs tab={tab} model={models[0]!} state={state} url={known?.url ?? "http://127.0.0.1:8000"} />
        </>
    );
}

function Models({
    models,
    fitting,
    canCompare,
    isFixed,
}: {
    models: readonly string[];
    fitting: readonly Model[];
    canCompare: boolean;
    /** While they answer. */
    isFixed: boolean;
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
                disabled={isFixed}
                {...(hint === "" ? {} : { hint })}
            />
            {canCompare ? (
                <Choice
                    label="Beside it"
                    value={second ?? ""}
                    options={[["", "nothing"], ...options]}
                    onChoose={(name) => choose(models[0] ?? "", name === "" ? undefined : name)}
                    disabled={isFixed}
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
