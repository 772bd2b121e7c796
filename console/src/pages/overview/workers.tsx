// Lists the workers, and shows all that is known of one.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { bytes, count, duration, percent, plural } from "../../format";
import { keep, link } from "../../route";
import type { Adapter, Tier, Worker } from "../../types";
import { Input, Meter, Section, State } from "../../ui/parts";
import { Table, type Column } from "../../ui/table";

const COLUMNS: readonly Column<Worker>[] = [
    {
        title: "Worker",
        isName: true,
        cell: (worker) => <a href={link("", "", { worker: worker.id })}>{worker.process ?? worker.id}</a>,
    },
    { title: "Role", cell: (worker) => worker.role ?? "–" },
    { title: "State", cell: (worker) => <State of={worker.state} /> },
    { title: "Models", isWide: true, cell: (worker) => <span class="names">{worker.models.join(", ")}</span> },
    { title: "KV use", isWide: true, cell: (worker) => <Meter value={worker.kv_used} label="KV use" /> },
    { title: "Hit rate", isNumber: true, cell: (worker) => percent(worker.hit_rate) },
    { title: "In flight", isNumber: true, cell: (worker) => count(worker.in_flight) },
    { title: "Tiers", isWide: true, cell: (worker) => <Tiers tiers={worker.tiers} /> },
    {
        title: "Adapters",
        isNumber: true,
        cell: (worker) => (worker.adapters.length === 0 ? "–" : worker.adapters.length),
    },
    { title: "Up", isNumber: true, cell: (worker) => duration(worker.uptime_seconds) },
];

/** More than these only when asked for: a long table is slow to draw and nobody reads it. */
const SHOWN = 25;

export function WorkerTable({ workers }: { workers: readonly Worker[] }): JSX.Element {
    const [text, setText] = useState("");
    const [isAll, showAll] = useState(false);
    if (workers.length <= SHOWN) return <Rows workers={workers} />;
    const wanted = text.trim().toLowerCase();
    const fitting =
        wanted === ""
            ? workers
            : workers.filter((worker) =>
                  [worker.id, worker.process, worker.role, worker.state, ...worker.models]
                      .join(" ")
                      .toLowerCase()
                      .includes(wanted),
              );
    return (
        <>
            <div class="bar-of">
                <Input
                    label="Find workers"
                    type="search"
                    value={text}
                    onInput={setText}
                    placeholder="name, role, state, model"
                />
            </div>
            <Rows workers={isAll ? fitting : fitting.slice(0, SHOWN)} />
            {isAll || fitting.length <= SHOWN ? null : (
                <button type="button" onClick={() => showAll(true)}>
                    Show all {fitting.length}
                </button>
            )}
        </>
    );
}

function Rows({ workers }: { workers: readonly Worker[] }): JSX.Element {
    return (
        <Table
            caption="Workers"
            columns={COLUMNS}
            rows={workers}
            keyOf={(worker) => worker.instance}
            empty="No worker is here."
            markOf={(worker) => (worker.last_error === null ? "" : "has-error")}
        />
    );
}

function Tiers({ tiers }: { tiers: readonly Tier[] }): JSX.Element {
    if (tiers.length === 0) return <span class="faint">–</span>;
    return <span class="names tiers">{tiers.map((tier) => `${tier.tier} ${share(tier)}`).join(", ")}</span>;
}

function share(tier: Tier): string {
    const { used_bytes: used, size_bytes: size } = tier;
    return used !== null && used !== undefined && size ? percent(used / size) : bytes(used);
}

export function errorText(worker: Worker): string | null {
    const error = worker.last_error;
    if (error === null || typeof error === "string") return error;
    return error.message ?? null;
}

export function WorkerDetail({ worker }: { worker: Worker }): JSX.Element {
    const box = useRef<HTMLDivElement>(null);
    useEffect(() => {
        box.current?.scrollIntoView({ block: "nearest" });
        box.current?.focus({ preventScroll: true });
    }, [worker.id]);
    const error = errorText(worker);
    const facts: [string, string][] = [
        ["Name", worker.id],
        ["Instance", worker.instance],
        ["Role", worker.role ?? "–"],
        ["Models", worker.models.join(", ")],
        ["Host", worker.host ?? "–"],
        ["Process", worker.pid === null ? "–" : String(worker.pid)],
        ["Up", duration(worker.uptime_seconds)],
        ["In flight", count(worker.in_flight)],
        ["Waiting", count(worker.waiting)],
        ["Requests per second", count(worker.requests_per_second)],
        ["Tokens per second", count(worker.tokens_per_second)],
        ["KV use", percent(worker.kv_used)],
        ["Hit rate", percent(worker.hit_rate)],
        ...Object.entries(worker.versions).map(([name, version]): [string, string] => [name, version]),
    ];
    const close = (
        <button type="button" class="small" onClick={() => keep({ worker: "" })}>
            Close
        </button>
    );
    return (
        <div ref={box} tabIndex={-1} class="detail">
            <Section
                title={`Worker ${worker.process ?? worker.id}`}
                aside={
                    <>
                        <State of={worker.state} />
                        <span class="push" />
                        {close}
                    </>
                }
            >
                {error === null ? null : <p class="said bad">{error}</p>}
                <dl class="facts">
                    {facts.map(([name, value]) => (
                        <div key={name}>
                            <dt>{name}</dt>
                            <dd>{value}</dd>
                        </div>
                    ))}
                </dl>
                <TierTable tiers={worker.tiers} />
                <Adapters adapters={worker.adapters} />
                <Ranks ranks={worker.ranks} />
                <p class="links">
                    <a href={link("requests", "", { worker: worker.id })}>Its requests</a>
                    {worker.process === null ? null : <a href={link("logs", worker.process)}>Its log</a>}
                    <a href={link("operate", "", { worker: worker.id })}>Operate it</a>
                </p>
            </Section>
        </div>
    );
}

function TierTable({ tiers }: { tiers: readonly Tier[] }): JSX.Element | null {
    if (tiers.length === 0) return null;
    return (
        <Table
            caption="Tiers of the KV cache"
            showCaption
            rows={tiers}
            keyOf={(tier) => tier.tier}
            columns={[
                { title: "Tier", isName: true, cell: (tier) => tier.tier },
                { title: "Used", isNumber: true, cell: (tier) => bytes(tier.used_bytes) },
                { title: "Size", isNumber: true, cell: (tier) => bytes(tier.size_bytes) },
                { title: "Tokens found", isNumber: true, cell: (tier) => count(tier.hit_tokens) },
                { title: "Read", isNumber: true, cell: (tier) => bytes(tier.read_bytes) },
                { title: "Written", isNumber: true, cell: (tier) => bytes(tier.written_bytes) },
            ]}
        />
    );
}

function Adapters({ adapters }: { adapters: readonly Adapter[] }): JSX.Element | null {
    if (adapters.length === 0) return null;
    return (
        <Table
            caption="Adapters"
            showCaption
            rows={adapters}
            keyOf={(adapter) => adapter.name}
            columns={[
                { title: "Adapter", isName: true, cell: (adapter) => adapter.name },
                { title: "State", cell: (adapter) => <State of={adapter.state} /> },
                { title: "Requests that use it", isNumber: true, cell: (adapter) => adapter.leases },
            ]}
        />
    );
}

function Ranks({ ranks }: { ranks: readonly Record<string, unknown>[] }): JSX.Element | null {
    if (ranks.length < 2) return null;
    const keys = [...new Set(ranks.flatMap((rank) => Object.keys(rank)))]
        .filter((key) => key !== "rank" && ranks.every((rank) => typeof rank[key] !== "object" || rank[key] === null))
        .slice(0, 8);
    return (
        <Table
            caption={plural(ranks.length, "rank")}
            showCaption
            rows={ranks.map((rank, i) => ({ ...rank, rank: rank["rank"] ?? i }))}
            keyOf={(rank) => String(rank.rank)}
            columns={[
                { title: "Rank", isName: true, cell: (rank) => String(rank.rank) },
                ...keys.map((key) => ({
                    title: key.replaceAll("_", " "),
                    isNumber: true,
                    cell: (rank: Record<string, unknown>) => text(rank[key]),
                })),
            ]}
        />
    );
}

function text(value: unknown): string {
    if (value === null || value === undefined) return "–";
    return typeof value === "number" && !Number.isInteger(value) ? value.toFixed(2) : String(value);
}
