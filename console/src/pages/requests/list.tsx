// The list of requests: newest first, followed live until it is held.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { get, isAbort, sentence } from "../../api";
import { clock, milliseconds, percent, plural, whole } from "../../format";
import { merged, opened, overview, recent, settings, workerName } from "../../live";
import { keep, link, route } from "../../route";
import { useStore } from "../../state";
import type { RequestRow } from "../../types";
import { Check, Choice, Notice, Section, State } from "../../ui/parts";
import { Table, type Column } from "../../ui/table";

const SHOWN = 50;
const PAGE = 100;
/** With more rows by hand the table gets slow; older ones are reached with filters. */
const MOST_OLDER = 600;
/** Of many requests not all are told to the page, so a filtered list is loaded again. */
const AGAIN_MS = 2000;

interface Answer {
    requests: RequestRow[];
    dropped: number;
    /** Why something is not shown. */
    notes?: string[];
}

/** The newest rows when the list, or the live stream, was opened or filtered. */
interface First extends Answer {
    filter: string;
    /** What had come before: it is in the answer, or older than it. */
    before: ReadonlySet<RequestRow>;
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
    const filter = JSON.stringify([worker, model]);
    const live = useStore(recent);
    const stream = useStore(opened);
    const [first, setFirst] = useState<First>({ requests: [], dropped: 0, filter: "", before: new Set() });
    const [older, setOlder] = useState<RequestRow[]>([]);
    const [isHeld, hold] = useState(false);
    const [problem, setProblem] = useState<string | null>(null);
    useEffect(() => {
        const stop = new AbortController();
        let timer = 0;
        const load = async (): Promise<void> => {
            const before = new Set(recent.get());
            try {
                const answer = await get<Answer>("api/requests", { limit: PAGE, worker, model }, stop.signal);
                setFirst({ ...answer, filter, before });
                setProblem(null);
            } catch (error) {
                if (isAbort(error)) return;
                setProblem(sentence(error));
            }
            if (worker !== "" || model !== "") timer = window.setTimeout(again, AGAIN_MS);
        };
        const again = (): void => {
            if (document.hidden) timer = window.setTimeout(again, AGAIN_MS);
            else void load();
        };
        void load();
        return () => {
            stop.abort();
            window.clearTimeout(timer);
        };
    }, [filter, stream]);
    useEffect(() => setOlder([]), [filter]);
    const fits = (row: RequestRow): boolean =>
        (worker === "" || row.worker === worker || row.prefill_worker === worker) &&
        (model === "" || row.model === model || row.adapter === model);
    const newest = useMemo(() => {
        const since = live.filter((row) => !first.before.has(row) && fits(row));
        return merged(first.requests.filter(fits), since).slice(0, SHOWN);
    }, [first, live, filter]);
    // Nothing moves without Follow, or under the pointer or the focus, until another filter is answered.
    const still = useRef({ filter: "", rows: newest });
    const [isUnderPointer, setUnderPointer] = useState(false);
    const [hasFocus, setFocus] = useState(false);
    const isStill = (isHeld || isUnderPointer || hasFocus) && still.current.filter === filter;
    if (!isStill) still.current = { filter: first.filter, rows: newest };
    const top = still.current.rows;
    const seen = new Set(top.map((row) => row.id));
    const rows = [...top, ...older.filter((row) => !seen.has(row.id) && fits(row))];
    const columns = rows.some((row) => row.tenant !== null)
        ? COLUMNS
        : COLUMNS.filter((column) => column.title !== "Tenant");
    const more = async (): Promise<void> => {
        hold(true);
        const before = rows.at(-1)?.id ?? null;
        const next = await get<Answer>("api/requests", { limit: PAGE, before, worker, model }).catch((error: unknown) =>
            setProblem(sentence(error)),
        );
        if (next && still.current.filter === filter) setOlder([...older, ...next.requests].slice(0, MOST_OLDER));
    };
    return (
        <>
            <div class="bar-of">
                <Filters worker={worker} model={model} />
                <Check
                    label="Follow"
                    checked={!isHeld}
                    onChange={(on) => {
                        hold(!on);
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
                    onMouseEnter={() => setUnderPointer(true)}
                    onMouseLeave={() => setUnderPointer(false)}
                    onFocusIn={() => setFocus(true)}
                    onFocusOut={({ currentTarget, relatedTarget }) =>
                        setFocus(relatedTarget instanceof Node && currentTarget.contains(relatedTarget))
                    }
                >
                    <Table
                        caption="Requests, the newest first"
                        columns={columns}
                        rows={rows}
                        empty="No request yet. Send one in the playground."
                        // Elements are used again by place: cheaper than new ones, and the focus stays.
                        keyOf={(_, i) => String(i)}
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
