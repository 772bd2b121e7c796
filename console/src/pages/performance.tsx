// Charts of the last hour, and the same figures as a table.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { get } from "../api";
import { clock, count, milliseconds, percent } from "../format";
import { overview, workerName } from "../live";
import { keep, route } from "../route";
import { useStore } from "../state";
import type { History, Numbers, Percentiles, Series, WorkerSeries } from "../types";
import { Chart, type Line } from "../ui/chart";
import { useLoad } from "../ui/load";
import { Empty, Input, Notice, Section, Segments } from "../ui/parts";
import { Table } from "../ui/table";

const RANGES = [
    ["300", "5 min"],
    ["900", "15 min"],
    ["3600", "1 hour"],
] as const;
const STEPS = 360; // of an answer; there is nothing new before the next one
const MOST_LINES = 6;
const TABLE_ROWS = 60;

export function PerformancePage(): JSX.Element {
    const { query } = useStore(route);
    const seconds = query.get("seconds") ?? "900";
    const [ttft, setTtft] = useState("1000");
    const [itl, setItl] = useState("50");
    const { value, problem } = useLoad(
        (signal) => get<History>("api/history", { seconds, ttft_ms: ttft, itl_ms: itl }, signal),
        [seconds, ttft, itl],
        Math.max(5, Number(seconds) / STEPS),
    );
    return (
        <>
            <div class="bar-of">
                <Segments
                    label="Time shown"
                    value={seconds}
                    options={RANGES}
                    onChoose={(chosen) => keep({ seconds: chosen })}
                />
                <Input label="Good: TTFT up to, ms" type="number" min={1} value={ttft} onInput={setTtft} />
                <Input label="and ITL up to, ms" type="number" min={1} value={itl} onInput={setItl} />
            </div>
            {problem === null ? null : <Notice>{problem}</Notice>}
            {value === null ? <Empty>Loading…</Empty> : <Charts series={value.series} />}
        </>
    );
}

function Charts({ series }: { series: Series }): JSX.Element {
    const workers = useStore(overview)
        ?.workers.map((worker) => worker.process)
        .join(); // their names are in the lines
    const groups = useMemo(() => chartsOf(series), [series, workers]);
    if (series.at.length === 0) return <Empty>No samples yet. The first come a few seconds after the start.</Empty>;
    return (
        <>
            <div class="charts">
                {groups.map(({ title, lines, write, most }) => (
                    <Section key={title} title={title}>
                        <Chart
                            label={title}
                            at={series.at}
                            lines={lines}
                            write={write}
                            {...(most === undefined ? {} : { most })}
                        />
                    </Section>
                ))}
            </div>
            <details class="card">
                <summary>The same as a table</summary>
                <HistoryTable series={series} />
            </details>
        </>
    );
}

interface OneChart {
    title: string;
    lines: Line[];
    write: (value: number | null | undefined) => string;
    most?: number;
}

function chartsOf(series: Series): OneChart[] {
    return [
        {
            title: "Requests per second",
            lines: [
                { name: "requests", values: series.requests_per_second },
                { name: "errors", values: series.errors_per_second },
            ],
            write: count,
        },
        {
            title: "Tokens per second",
            lines: [
                { name: "output", values: series.output_tokens_per_second },
                { name: "prompt", values: series.prompt_tokens_per_second },
            ],
            write: count,
        },
        { title: "Time to first token", lines: spread(series.ttft_ms), write: milliseconds },
        { title: "Time between tokens", lines: spread(series.itl_ms), write: milliseconds },
        { title: "Requests in flight", lines: [{ name: "in flight", values: series.in_flight }], write: count },
        {
            title: "Goodput: share of requests in time",
            lines: [{ name: "goodput", values: series.goodput }],
            write: percent,
            most: 1,
        },
        { title: "KV cache in use, by worker", lines: byWorker(series, "kv_used"), write: percent, most: 1 },
        { title: "Prefix cache hit rate, by worker", lines: byWorker(series, "hit_rate"), write: percent, most: 1 },
    ];
}

function spread(values: Percentiles): Line[] {
    return [
        { name: "p50", values: values.p50 },
        { name: "p90", values: values.p90 },
        { name: "p99", values: values.p99 },
    ];
}

/** One line per worker, or the lowest, the middle and the highest of many. */
export function byWorker(series: Series, key: keyof WorkerSeries): Line[] {
    const all = Object.entries(series.workers)
        .map(([id, one]) => ({ name: workerName(id), values: one[key] }))
        .filter((line) => line.values.some((value) => value !== null))
        .sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    if (all.length <= MOST_LINES) return all;
    const columns = series.at.map((_, i) =>
        all
            .map((line) => line.values[i] ?? null)
            .filter((value) => value !== null)
            .sort((a, b) => a - b),
    );
    const pick = (share: number): Numbers =>
        columns.map((column) => column[Math.floor((column.length - 1) * share)] ?? null);
    return [
        { name: "lowest", values: pick(0) },
        { name: "median", values: pick(0.5) },
        { name: "highest", values: pick(1) },
    ];
}

function HistoryTable({ series }: { series: Series }): JSX.Element {
    const step = Math.max(1, Math.ceil(series.at.length / TABLE_ROWS));
    const rows = series.at
        .map((_, i) => i)
        .filter((i) => (series.at.length - 1 - i) % step === 0)
        .reverse();
    const figure = (title: string, values: Numbers, write: (value: number | null | undefined) => string) => ({
        title,
        isNumber: true,
        cell: (i: number) => write(values[i]),
    });
    return (
        <Table
            caption="Samples, the newest first"
            rows={rows}
            keyOf={(i) => String(series.at[i])}
            columns={[
                { title: "Time", isName: true, cell: (i) => clock(series.at[i]) },
                figure("Requests/s", series.requests_per_second, count),
                figure("Errors/s", series.errors_per_second, count),
                figure("Output tok/s", series.output_tokens_per_second, count),
                figure("Prompt tok/s", series.prompt_tokens_per_second, count),
                figure("In flight", series.in_flight, count),
                figure("TTFT p50", series.ttft_ms.p50, milliseconds),
                figure("TTFT p99", series.ttft_ms.p99, milliseconds),
                figure("ITL p50", series.itl_ms.p50, milliseconds),
                figure("ITL p99", series.itl_ms.p99, milliseconds),
                figure("Goodput", series.goodput, percent),
            ]}
        />
    );
}
