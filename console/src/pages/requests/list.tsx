// The list of requests: newest first, followed live until it is held.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, sentence } from "../../api";
import { clock, milliseconds, percent, plural, whole } from "../../format";
import { merged, overview, recent, settings, workerName } from "../../live";
import { keep, link, route } from "../../route";
import { useStore } from "../../state";
import type { RequestRow } from "../../types";
import { Check, Choice, Notice, Section, State } from "../../ui/parts";
import { Table, type Column } from "../../ui/table";

const SHOWN = 50;
const PAGE = 100;
/** With more rows by hand the table gets slow; older ones are reached with filters. */
const MOST_OLDER = 600;

interface Answer {
    requests: RequestRow[];
    dropped: number;
    /** Why something is not shown. */
    notes?: string[];
}

const COLUMNS: readonly Column<RequestRow>[] = [
    {
        title: "Time",
        isName: true,
        cell: (row) => (
            <a href={link("requests", row.id)} aria-label={`Request at ${clock(row.at)}, ${row.id}`}>
                {clock(row.at)}
            </a>
        ),
    },
    { title: "Model", isWide: true, cell: (row) => <span class="names">{row.adapter ?? row.model ?? "–"}</span> },
    { title: "Tenant", isWide: true, cell: (row) => <span class="names">{row.tenant ?? "–"}</span> },
    {
        title: "Worker",
        isWide: true,
        cell: (row) => (
            <span class="names">
                {[row.prefill_worker, row.worker]
                    .filter((id) => id !== null)
                    .map(workerName)
                    .join(" → ") || "–"}
            </span>
        ),
    },
    { title: "Prompt", isNumber: true, cell: (row) => whole(row.input_tokens) },
    {
        title: "Cached",
        isNumber: true,
        cell: (row) =>
            row.cached_tokens === null || !row.input_tokens ? "–" : percent(row.cached_tokens / row.input_tokens),
    },
    { title: "Answer", isNumber: true, cell: (row) => whole(row.output_tokens) },
    { title: "TTFT", isNumber: true, cell: (row) => milliseconds(row.ttft_ms) },
    { title: "Total", isNumber: true, cell: (row) => milliseconds(row.total_ms) },
    { title: "Outcome", cell: (row) => <State of={row.outcome} /> },
    {
        title: "Why",
        cell: (row) =>
            row.why ? (
                <a href={link("requests", row.id)} aria-label={`Why request ${row.id} went there`}>
                    why
                </a>
            ) : (
                <span class="faint">–</span>
            ),
    },
];

export function RequestList(): JSX.Element {
    const { query } = useStore(route);
    const worker = query.get("worker") ?? "";
    const model = query.get("model") ?? "";
    const live = useStore(recent);
    const [first, setFirst] = useState<Answer>({ requests: [], dropped: 0 });
    const [older, setOlder] = useState<RequestRow[]>([]);
    const [held, hold] = useState<RequestRow[] | null>(null);
    const [problem, setProblem] = useState<string | null>(null);
    useEffect(() => {
        setOlder([]);
        get<Answer>("api/requests", { limit: PAGE, worker, model }).then(setFirst, (error: unknown) =>
            setProblem(sentence(error)),
        );
    }, [worker, model]);
    const fits = (row: RequestRow): boolean =>
        (worker === "" || row.worker === worker || row.prefill_worker === worker) &&
        (model === "" || row.model === model || row.adapter === model);
    const newest = useMemo(
        () => merged(first.requests, live.filter(fits)).slice(0, SHOWN),
        [first, live, worker, model],
    );
    // Nothing moves under the pointer or the focus.
    const still = useRef<RequestRow[]>([]);
    const [isTouched, touch] = useState(false);
    if (!isTouched) still.current = newest;
    const top = held ?? still.current;
    const seen = new Set(top.map((row) => row.id));
    const rows = [...top, ...older.filter((row) => !seen.has(row.id))];
    // While rows flow past, elements are used again by place: cheaper than new ones for each request.
    const isFlowing = held === null && !isTouched;
    const columns = rows.some((row) => row.tenant !== null)
        ? COLUMNS
        : COLUMNS.filter((column) => column.title !== "Tenant");
    const more = async (): Promise<void> => {
        hold(top);
        const before = rows.at(-1)?.id ?? null;
        const next = await get<Answer>("api/requests", { limit: PAGE, before, worker, model }).catch((error: unknown) =>
            setProblem(sentence(error)),
        );
        if (next) setOlder([...older, ...next.requests].slice(0, MOST_OLDER));
    };
    return (
        <>
            <div class="bar-of">
                <Filters worker={worker} model={model} />
                <Check
                    label="Follow"
                    checked={held === null}
                    onChange={(on) => {
                        hold(on ? null : newest);
                        if (on) setOlder([]);
                    }}
                />
            </div>
            {problem === null ? null : <Notice>{problem}</Notice>}
            {(first.notes ?? []).map((note) => (
                <p key={note} class="hint">
                    {note}
                </p>
            ))}
            <Section
                title="Requests"
                aside={
                    <span class="faint">
                        newest first{first.dropped > 0 ? `; ${plural(first.dropped, "older one")} forgotten` : ""}
                    </span>
                }
            >
                <div
                    onMouseEnter={() => touch(true)}
                    onMouseLeave={() => touch(false)}
                    onFocusIn={() => touch(true)}
                    onFocusOut={() => touch(false)}
                >
                    <Table
                        caption="Requests, the newest first"
                        columns={columns}
                        rows={rows}
                        empty="No request yet. Send one in the playground."
                        keyOf={isFlowing ? (_, i) => String(i) : (row) => row.id}
                    />
                </div>
                {rows.length >= SHOWN && older.length < MOST_OLDER ? (
                    <button type="button" onClick={() => void more()}>
                        Show older ones
                    </button>
                ) : null}
            </Section>
        </>
    );
}

function Filters({ worker, model }: { worker: string; model: string }): JSX.Element {
    const workers = useStore(overview)?.workers ?? [];
    const models = useStore(settings)?.models ?? [];
    const ids = [...new Set([...workers.map((one) => one.id), ...(worker === "" ? [] : [worker])])];
    return (
        <>
            <Choice
                label="Worker"
                value={worker}
                onChoose={(value) => keep({ worker: value })}
                options={[["", "all workers"], ...ids.map((id) => [id, workerName(id)] as const)]}
            />
            <Choice
                label="Model"
                value={model}
                onChoose={(value) => keep({ model: value })}
                options={[["", "all models"], ...models.map((one) => [one.name, one.name] as const)]}
            />
        </>
    );
}
