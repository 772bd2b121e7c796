// Completions, embeddings, rerank and pictures: one question, one answer.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { plural, whole } from "../../format";
import { useStore } from "../../state";
import { Area, Choice, Empty, Notice } from "../../ui/parts";
import { Table } from "../../ui/table";
import { AnswerView } from "./answer_view";
import { change, clear, sendCompletion, session, stop as stopRound } from "./session";
import { documentsOf, embeddingBody, pictureBody, rerankBody, SIZES } from "./request";
import { Buttons, Outcome, useTask } from "./task";

export function Completion({ models }: { models: readonly string[] }): JSX.Element {
    const { prompt, texts, isRunning, problem } = useStore(session);
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    void sendCompletion(models, prompt);
                }}
            >
                <Area label="Prompt" rows={5} value={prompt} onInput={(value) => change({ prompt: value })} />
                <div class="buttons">
                    <button type="submit" class="primary" disabled={isRunning || prompt === ""}>
                        Complete
                    </button>
                    <button type="button" disabled={!isRunning} onClick={stopRound}>
                        Stop
                    </button>
                    <span class="push" />
                    <button type="button" onClick={clear}>
                        Clear
                    </button>
                </div>
            </form>
            {problem === null ? null : <Notice>{problem}</Notice>}
            <div class={models.length > 1 ? "panes two" : "panes"}>
                {texts.map((answer, i) => (
                    <section key={i} class="talk" aria-label={`Answer of ${models[i]}`}>
                        <h3 class="cut">{models[i]}</h3>
                        <AnswerView answer={answer} />
                    </section>
                ))}
            </div>
        </>
    );
}

interface Embeddings {
    data: { index: number; embedding: number[] }[];
    usage?: { prompt_tokens?: number };
}

export function Embedding({ model }: { model: string }): JSX.Element {
    const { prompt } = useStore(session);
    const { task, go, stop } = useTask<Embeddings>();
    const [asked, setAsked] = useState<string[]>([]);
    const vectors = task.value?.data.map((one) => one.embedding) ?? [];
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    setAsked(documentsOf(prompt));
                    void go("v1/embeddings", embeddingBody(model, prompt));
                }}
            >
                <Area
                    label="Texts"
                    rows={5}
                    value={prompt}
                    onInput={(value) => change({ prompt: value })}
                    hint="one per line; the table compares them"
                />
                <Buttons title="Embed" canGo={documentsOf(prompt).length > 0} task={task} stop={stop} />
            </form>
            <Outcome task={task} />
            {vectors.length === 0 ? null : (
                <>
                    <p>
                        {plural(vectors.length, "vector")} of {whole(vectors[0]?.length)} numbers. The table has the
                        cosine between each two.
                    </p>
                    <Table
                        caption="Likeness of the texts"
                        rows={vectors.map((vector, i) => ({ vector, i }))}
                        keyOf={(row) => String(row.i)}
                        columns={[
                            { title: "Text", isName: true, cell: (row) => <span class="names">{asked[row.i]}</span> },
                            ...vectors.slice(0, 8).map((other, k) => ({
                                title: `to ${k + 1}`,
                                isNumber: true,
                                cell: (row: { vector: number[] }) => cosine(row.vector, other).toFixed(2),
                            })),
                        ]}
                    />
                </>
            )}
        </>
    );
}

export function cosine(a: readonly number[], b: readonly number[]): number {
    let dot = 0;
    let aa = 0;
    let bb = 0;
    a.forEach((value, i) => {
        const other = b[i] ?? 0;
        dot += value * other;
        aa += value * value;
        bb += other * other;
    });
    return aa === 0 || bb === 0 ? 0 : dot / Math.sqrt(aa * bb);
}

interface Ranked {
    results: { index: number; relevance_score: number }[];
}

export function Rerank({ model }: { model: string }): JSX.Element {
    const { prompt, question } = useStore(session);
    const { task, go, stop } = useTask<Ranked>();
    const [asked, setAsked] = useState<string[]>([]);
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    setAsked(documentsOf(prompt));
                    void go("v1/rerank", rerankBody(model, question, prompt));
                }}
            >
                <Area label="Question" rows={1} value={question} onInput={(value) => change({ question: value })} />
                <Area
                    label="Documents"
                    rows={5}
                    value={prompt}
                    onInput={(value) => change({ prompt: value })}
                    hint="one per line"
                />
                <Buttons
                    title="Rank"
                    canGo={question !== "" && documentsOf(prompt).length > 0}
                    task={task}
                    stop={stop}
                />
            </form>
            <Outcome task={task} />
            {task.value === null ? null : (
                <Table
                    caption="Documents, the best first"
                    rows={task.value.results}
                    keyOf={(row) => String(row.index)}
                    columns={[
                        {
                            title: "Document",
                            isName: true,
                            cell: (row) => <span class="names">{asked[row.index]}</span>,
                        },
                        { title: "Score", isNumber: true, cell: (row) => row.relevance_score.toFixed(4) },
                    ]}
                />
            )}
        </>
    );
}

interface Pictures {
    data: { b64_json?: string; url?: string }[];
}

export function Picture({ model }: { model: string }): JSX.Element {
    const { prompt, size } = useStore(session);
    const { task, go, stop } = useTask<Pictures>();
    const urls = (task.value?.data ?? [])
        .map((one) => (one.b64_json === undefined ? (one.url ?? "") : `data:image/png;base64,${one.b64_json}`))
        .filter((url) => url.startsWith("data:image/"));
    return (
        <>
            <form
                onSubmit={(event) => {
                    event.preventDefault();
                    void go("v1/images/generations", pictureBody(model, prompt, size));
                }}
            >
                <Area label="Description" rows={3} value={prompt} onInput={(value) => change({ prompt: value })} />
                <Choice
                    label="Size"
                    value={size}
                    options={SIZES.map((one) => [one, one] as const)}
                    onChoose={(value) => change({ size: value })}
                />
                <Buttons title="Draw" canGo={prompt !== ""} task={task} stop={stop} />
            </form>
            <Outcome task={task} />
            {urls.map((url) => (
                <img key={url.slice(-40)} src={url} alt={prompt} class="picture" />
            ))}
            {task.value !== null && urls.length === 0 ? (
                <Empty>The answer has no picture that can be shown here.</Empty>
            ) : null}
        </>
    );
}
