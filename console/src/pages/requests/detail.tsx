// One request: what it was, each decision of the router with its candidates, and how its time went.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { get } from "../../api";
import { clock, milliseconds, plural, whole } from "../../format";
import { overview, recent, workerName } from "../../live";
import { link } from "../../route";
import { useStore } from "../../state";
import type { Candidate, Decision, RequestDetail, RequestRow, Span } from "../../types";
import { useLoad } from "../../ui/load";
import { Empty, Notice, Section, State } from "../../ui/parts";
import { Table, type Column } from "../../ui/table";
import { explain, nameOf, partsOf } from "./explain";

const ASK_SECONDS = 2;
/** A request that is not known by then was forgotten. */
const GIVE_UP_MS = 60_000;

export function RequestDetailView({ id }: { id: string }): JSX.Element {
    useStore(overview); // names of workers come from there
    // Who follows the link of an answer at once is here before the frontend's record of it. Of many requests not all
    // are told to the page, so it also asks.
    const hasCome = useStore(recent).some((row) => row.id === id);
    const [isLate, setLate] = useState(false);
    useEffect(() => {
        setLate(false);
        const timer = window.setTimeout(() => setLate(true), GIVE_UP_MS);
        return () => window.clearTimeout(timer);
    }, [id]);
    const { value, problem } = useLoad(
        (signal) => get<RequestDetail>(`api/requests/${encodeURIComponent(id)}`, {}, signal),
        [id, hasCome],
        isLate ? 0 : ASK_SECONDS,
        "known",
    );
    return (
        <>
            <p class="links">
                <a href={link("requests")}>← All requests</a>
            </p>
            {problem === null ? null : <Notice>{problem}</Notice>}
            {problem === null || hasCome || isLate ? null : (
                <p class="hint">A request is known some seconds after its end. It is shown here as soon as it is.</p>
            )}
            {value === null ? problem === null && <Empty>Loading…</Empty> : <Detail detail={value} />}
        </>
    );
}

function Detail({ detail }: { detail: RequestDetail }): JSX.Element {
    return (
        <>
            <Facts row={detail.request} />
            {detail.decisions.length === 0 ? (
                <Empty>How the router decided is not known for this request.</Empty>
            ) : null}
            {detail.decisions.map((decision) => (
                <DecisionView key={`${decision.phase} ${decision.attempt}`} decision={decision} />
            ))}
            <Section title="Time line">
                <TimeLine spans={detail.timeline} />
            </Section>
        </>
    );
}

function Facts({ row }: { row: RequestRow }): JSX.Element {
    const facts: [string, string | null][] = [
        ["Model", row.model],
        ["Adapter", row.adapter],
        ["Tenant", row.tenant],
        ["Received", clock(row.at)],
        ["Prompt", `${whole(row.input_tokens)} tokens, ${whole(row.cached_tokens)} cached`],
        ["Answer", `${whole(row.output_tokens)} tokens`],
        ["First token after", milliseconds(row.ttft_ms)],
        ["Total", milliseconds(row.total_ms)],
        ["Prefill worker", row.prefill_worker === null ? null : workerName(row.prefill_worker)],
        ["Worker", row.worker === null ? null : workerName(row.worker)],
    ];
    return (
        <Section
            title="Request"
            aside={
                <>
                    <span class="mono cut">{row.id}</span>
                    <State of={row.outcome} />
                </>
            }
        >
            <dl class="facts">
                {facts
                    .filter(([, value]) => value !== null)
                    .map(([name, value]) => (
                        <div key={name}>
                            <dt>{name}</dt>
                            <dd>{value}</dd>
                        </div>
                    ))}
            </dl>
        </Section>
    );
}

const PHASES = {
    agg: "Choice of the worker",
    prefill: "Choice of the prefill worker",
    decode: "Choice of the decode worker",
};

function DecisionView({ decision }: { decision: Decision }): JSX.Element {
    const most = Math.max(1, ...decision.candidates.map((one) => one.cost ?? 0));
    const title = `${PHASES[decision.phase] ?? decision.phase}${decision.attempt > 1 ? `, attempt ${decision.attempt}` : ""}`;
    const rows = [...decision.candidates].sort(
        (a, b) => Number(b.is_chosen) - Number(a.is_chosen) || (a.cost ?? 0) - (b.cost ?? 0),
    );
    return (
        <Section
            title={title}
            aside={
                <span class="faint">
                    {plural(decision.prompt_blocks, "prompt block")} of {decision.block_size} tokens
                </span>
            }
        >
            <p class="sentence">{explain(decision)}</p>
            <Table
                caption={`${title}: candidates`}
                columns={columns(decision, most)}
                rows={rows}
                keyOf={nameOf}
                markOf={(one) => (one.is_chosen ? "chosen" : "")}
            />
            <FormulaText decision={decision} />
            {(decision.notes ?? []).map((note) => (
                <p key={note} class="hint">
                    {note}
                </p>
            ))}
            {decision.exact || (decision.notes ?? []).length > 0 ? null : (
                <p class="hint">
                    Computed after the fact from what the workers reported; the router's own figures may differ a
                    little.
                </p>
            )}
        </Section>
    );
}

function columns(decision: Decision, most: number): readonly Column<Candidate>[] {
    const all: Column<Candidate>[] = [
        {
            title: "Worker",
            isName: true,
            cell: (one) => (
                <>
                    {nameOf(one)}
                    {one.is_chosen ? " " : null}
                    {one.is_chosen ? <span class="tag">chosen</span> : null}
                </>
            ),
        },
        { title: "Overlap", isWide: true, cell: (one) => <Overlap decision={decision} candidate={one} /> },
        { title: "Active requests", isNumber: true, cell: (one) => whole(one.active_requests) },
        { title: "Prefill tokens waiting", isNumber: true, cell: (one) => whole(one.active_prefill_tokens) },
        { title: "Active blocks", isNumber: true, cell: (one) => whole(one.active_blocks) },
        { title: "Cost", isWide: true, cell: (one) => <Cost decision={decision} candidate={one} most={most} /> },
    ];
    return decision.phase === "decode"
        ? all.filter((column) => column.title !== "Overlap" && column.title !== "Prefill tokens waiting")
        : all;
}

function Overlap({ decision, candidate }: { decision: Decision; candidate: Candidate }): JSX.Element {
    const { device, host, disk } = candidate.overlap;
    const all = Math.max(1, decision.prompt_blocks);
    const said = [`${device} device`, host > 0 ? `${host} host` : "", disk > 0 ? `${disk} disk` : ""]
        .filter((text) => text !== "")
        .join(", ");
    return (
        <span class="meter long">
            <span class="bar" aria-hidden="true">
                <span class="fill device" style={{ width: `${(device / all) * 100}%` }} />
                <span class="fill host" style={{ width: `${(host / all) * 100}%` }} />
                <span class="fill disk" style={{ width: `${(disk / all) * 100}%` }} />
            </span>
            <span>{said}</span>
        </span>
    );
}

function Cost({ decision, candidate, most }: { decision: Decision; candidate: Candidate; most: number }): JSX.Element {
    if (candidate.cost === null) return <span class="faint">–</span>;
    const parts = partsOf(decision, candidate);
    const width = (value: number): { width: string } => ({ width: `${(value / most) * 100}%` });
    return (
        <span class="meter long">
            <span class="bar" aria-hidden="true">
                {parts === null ? (
                    <span class="fill plain" style={width(candidate.cost)} />
                ) : (
                    <>
                        <span class="fill compute" style={width(parts.compute)} />
                        <span class="fill blocks" style={width(parts.blocks)} />
                        <span class="fill requests" style={width(parts.requests)} />
                    </>
                )}
            </span>
            <span class="num">{whole(candidate.cost)}</span>
        </span>
    );
}

function FormulaText({ decision }: { decision: Decision }): JSX.Element | null {
    const f = decision.formula;
    if (f === null) return null;
    const compute = `${f.overlap_weight} × max(0, prefill tokens ÷ ${decision.block_size} + ${decision.prompt_blocks} − ${f.credit} × device − ${f.host} × host − ${f.disk} × disk)`;
    return (
        <p class="hint formula">
            cost ={decision.phase === "decode" ? null : <span class="key compute">to compute: {compute}</span>}
            {decision.phase === "prefill" ? null : <span class="key blocks">active blocks</span>}
            <span class="key load">{f.request_blocks} × active requests</span>
        </p>
    );
}

function TimeLine({ spans }: { spans: readonly Span[] }): JSX.Element {
    const end = Math.max(1, ...spans.map((span) => span.to_ms));
    if (spans.length === 0) return <Empty>No times are known.</Empty>;
    return (
        <ol class="timeline">
            {spans.map((span) => (
                <li key={`${span.what} ${span.from_ms}`}>
                    <span class="what">
                        {span.what}
                        {span.worker === null ? "" : ` · ${workerName(span.worker)}`}
                    </span>
                    <span class="track" aria-hidden="true">
                        <span
                            class={`span ${/^[a-z]+$/.test(span.what) ? span.what : ""}`}
                            style={{
                                left: `${(span.from_ms / end) * 100}%`,
                                width: `${(Math.max(0, span.to_ms - span.from_ms) / end) * 100}%`,
                            }}
                        />
                    </span>
                    <span class="num">
                        {span.to_ms > span.from_ms
                            ? milliseconds(span.to_ms - span.from_ms)
                            : `at ${milliseconds(span.from_ms)}`}
                    </span>
                </li>
            ))}
        </ol>
    );
}
