// Puts load on the deployment with `bench load` and draws it while it runs.
import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { get, post, sentence } from "../api";
import { count, duration, milliseconds, percent, whole } from "../format";
import { bench, opened, settings } from "../live";
import { useStore } from "../state";
import type { Bench, Stage } from "../types";
import { Chart } from "../ui/chart";
import { Code } from "../ui/code";
import { Choice, Empty, Input, Notice, Section, Segments, State } from "../ui/parts";
import { Table, type Column } from "../ui/table";

interface Form {
    model: string;
    concurrency: string;
    until: "requests" | "seconds";
    amount: string;
    input: string;
    output: string;
    prompts: string;
}

const START: Form = {
    model: "",
    concurrency: "8",
    until: "seconds",
    amount: "20",
    input: "256",
    output: "64",
    prompts: "random",
};

export function bodyOf(form: Form): Record<string, unknown> {
    return {
        model: form.model,
        concurrency: form.concurrency.trim(),
        [form.until]: Number(form.amount),
        input_tokens: Number(form.input),
        output_tokens: Number(form.output),
        prompts: form.prompts,
    };
}

export function commandOf(form: Form, url: string): string {
    return `dynamo-vllm bench load ${url} --model ${quoted(form.model)} --concurrency ${form.concurrency} --${form.until} ${form.amount} --input-tokens ${form.input} --output-tokens ${form.output} --prompts ${form.prompts}`;
}

function quoted(text: string): string {
    return /^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

export function BenchPage(): JSX.Element {
    const known = useStore(settings);
    const state = useStore(bench) as Bench | null;
    const [problem, setProblem] = useState<string | null>(null);
    const stream = useStore(opened);
    const fail = (error: unknown): void => setProblem(sentence(error));
    const refresh = (): Promise<void> => get<Bench>("api/bench").then((value) => bench.set(value), fail);
    useEffect(() => {
        setProblem(null);
        void refresh();
    }, [stream]);
    const act = async (path: string, body: unknown): Promise<void> => {
        setProblem(null);
        await post(path, body).catch(fail);
        await refresh(); // also after a refusal: something else runs, or nothing any more
    };
    const isRunning = state?.state === "running";
    return (
        <>
            {known?.read_only === true ? (
                <Notice tone="idle">This console is read only: it shows the last run, and starts none.</Notice>
            ) : (
                <Start isRunning={isRunning} act={act} />
            )}
            {problem === null ? null : <Notice>{problem}</Notice>}
            {state === null || state.state === "idle" ? (
                <Empty>
                    No run yet. The load goes through the deployment's public address, beside the requests of others.
                </Empty>
            ) : (
                <Run state={state} />
            )}
        </>
    );
}

function Start({
    isRunning,
    act,
}: {
    isRunning: boolean;
    act: (path: string, body: unknown) => Promise<void>;
}): JSX.Element {
    const known = useStore(settings);
    const models = (known?.models ?? []).filter((model) => model.kind === "chat" || model.kind === "completions");
    const [form, setForm] = useState<Form>(START);
    const filled = { ...form, model: form.model === "" ? (models[0]?.name ?? "") : form.model };
    const set = (key: keyof Form) => (value: string) => setForm({ ...filled, [key]: value });
    if (models.length === 0)
        return <Empty>No model that generates text is served, so there is nothing to measure.</Empty>;
    return (
        <Section title="Load">
            <form
                class="form"
                onSubmit={(event) => {
                    event.preventDefault();
                    void act("api/bench", bodyOf(filled));
                }}
            >
                <Choice
                    label="Model"
                    value={filled.model}
                    onChoose={set("model")}
                    options={models.map((model) => [model.name, model.name] as const)}
                />
                <Input
                    label="Requests at a time"
                    value={form.concurrency}
                    onInput={set("concurrency")}
                    hint="1,8,32 makes three stages"
                    required
                />
                <div class="field">
                    <span class="label">Until</span>
                    <Segments
                        label="Until"
                        value={form.until}
                        onChoose={set("until")}
                        options={[
                            ["seconds", "seconds"],
                            ["requests", "requests"],
                        ]}
                    />
                </div>
                <Input
                    label={form.until === "seconds" ? "Seconds" : "Requests"}
                    type="number"
                    min={1}
                    value={form.amount}
                    onInput={set("amount")}
                    required
                />
                <Input label="Prompt tokens" type="number" min={1} value={form.input} onInput={set("input")} required />
                <Input
                    label="Answer tokens"
                    type="number"
                    min={1}
                    value={form.output}
                    onInput={set("output")}
                    required
                />
                <Choice
                    label="Prompts"
                    value={form.prompts}
                    onChoose={set("prompts")}
                    options={[
                        ["random", "random: nothing shared"],
                        ["prefix", "prefix: shared beginnings"],
                        ["turns", "turns: conversations"],
                    ]}
                />
                <div class="buttons">
                    <button type="submit" class="primary" disabled={isRunning}>
                        Start
                    </button>
                    <button type="button" disabled={!isRunning} onClick={() => void act("api/bench/stop", {})}>
                        Stop
                    </button>
                </div>
            </form>
            <Code label="The same as a command" text={commandOf(filled, known?.url ?? "URL")} />
        </Section>
    );
}

function Run({ state }: { state: Bench }): JSX.Element {
    const rows = state.progress;
    const at = useMemo(() => rows.map((row) => row.at), [rows]);
    const rates = useMemo(
        () => [{ name: "output tokens/s", values: rows.map((row) => row.output_tokens_per_second) }],
        [rows],
    );
    const first = useMemo(() => [{ name: "TTFT", values: rows.map((row) => row.ttft_ms) }], [rows]);
    const now = rows.at(-1);
    return (
        <>
            <Section
                title="Run"
                aside={
                    <>
                        <State of={state.state} />
                        <span class="faint">{duration(state.seconds)}</span>
                    </>
                }
            >
                {state.error === null ? null : <p class="said bad">{state.error}</p>}
                <p class="hidden" role="status">
                    {state.state === "running" ? "The load runs." : `The run is ${state.state}.`}
                </p>
                {now === undefined || (state.state !== "running" && state.stages.length > 0) ? null : (
                    <p>
                        {whole(now.done)} done, {whole(now.failed)} failed, {count(now.requests_per_second)} requests/s,{" "}
                        {count(now.output_tokens_per_second)} output tokens/s
                    </p>
                )}
                {rows.length < 2 ? null : (
                    <div class="charts">
                        <Chart label="Output tokens per second" at={at} lines={rates} write={count} isTime={false} />
                        <Chart label="Time to first token" at={at} lines={first} write={milliseconds} isTime={false} />
                    </div>
                )}
            </Section>
            {state.stages.length === 0 ? null : (
                <Section title="Result">
                    <Table
                        caption="Figures of each stage"
                        columns={STAGES}
                        rows={state.stages}
                        keyOf={(stage) => stage.name}
                    />
                </Section>
            )}
        </>
    );
}

const STAGES: readonly Column<Stage>[] = [
    { title: "Stage", isName: true, cell: (stage) => stage.name },
    { title: "OK", isNumber: true, cell: (stage) => whole(stage.requests.ok) },
    { title: "Failed", isNumber: true, cell: (stage) => whole(stage.requests.failed) },
    { title: "Req/s", isNumber: true, cell: (stage) => count(stage.requests.per_second) },
    { title: "Tok/s", isNumber: true, cell: (stage) => count(stage.tokens.output_per_second) },
    { title: "TTFT p50", isNumber: true, cell: (stage) => milliseconds(stage.ttft_ms.p50) },
    { title: "p90", isNumber: true, cell: (stage) => milliseconds(stage.ttft_ms.p90) },
    { title: "p99", isNumber: true, cell: (stage) => milliseconds(stage.ttft_ms.p99) },
    { title: "ITL p50", isNumber: true, cell: (stage) => milliseconds(stage.itl_ms.p50) },
    { title: "ITL p99", isNumber: true, cell: (stage) => milliseconds(stage.itl_ms.p99) },
    { title: "E2E p50", isNumber: true, cell: (stage) => milliseconds(stage.e2e_ms.p50) },
    { title: "E2E p99", isNumber: true, cell: (stage) => milliseconds(stage.e2e_ms.p99) },
    {
        title: "Cached",
        isNumber: true,
        cell: (stage) =>
            stage.tokens.cached === null ? "–" : percent(stage.tokens.cached / Math.max(1, stage.tokens.prompt)),
    },
];
