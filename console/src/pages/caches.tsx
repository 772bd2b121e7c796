// Which prefixes are cached where: a heat map of the prefix tree over workers and tiers.
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { get } from "../api";
import { plural, whole } from "../format";
import { workerName } from "../live";
import type { Caches, TierBlocks } from "../types";
import { useLoad } from "../ui/load";
import { Choice, Empty, Notice, Section, Segments } from "../ui/parts";
import { Table } from "../ui/table";
import { HeatMap } from "./caches/heat_map";
import { NodeTable } from "./caches/node_table";
import { rowsOf, type Order, type TierChoice } from "./caches/rows";

const ORDERS = [
    ["tree", "as the tree"],
    ["used", "most used first"],
    ["blocks", "longest first"],
] as const;
const TIERS = [
    ["all", "all tiers"],
    ["device", "device"],
    ["host", "host memory"],
    ["disk", "disk"],
] as const;

export function CachesPage(): JSX.Element {
    const { value, problem } = useLoad((signal) => get<Caches>("api/caches", {}, signal), [], 4);
    const [order, setOrder] = useState<Order>("tree");
    const [tier, setTier] = useState<TierChoice>("all");
    const rows = useMemo(() => (value === null ? [] : rowsOf(value.tree.nodes, order)), [value, order]);
    const workers = useMemo(() => byWorker(value?.workers ?? []), [value]);
    if (value === null) return problem === null ? <Empty>Loading…</Empty> : <Notice>{problem}</Notice>;
    const left = value.tree.left_out > 0 ? `; ${plural(value.tree.left_out, "smaller one")} left out` : "";
    return (
        <>
            {problem === null ? null : <Notice>{problem}</Notice>}
            <p class="lead">
                Each row is a run of blocks that prompts begin with, under the run before it. A cell shows how much of
                the run a worker holds, and in which tier.
            </p>
            <div class="bar-of">
                <Choice label="Rows" value={order} options={ORDERS} onChoose={(chosen) => setOrder(chosen as Order)} />
                <Segments
                    label="Tier"
                    value={tier}
                    options={TIERS}
                    onChoose={(chosen) => setTier(chosen as TierChoice)}
                />
                <span class="legend">
                    <span class="key device">device</span>
                    <span class="key host">host memory</span>
                    <span class="key disk">disk</span>
                </span>
            </div>
            <Section
                title="Prefixes"
                aside={
                    <span class="faint">
                        {plural(rows.length, "run")} of {whole(value.blocks)} blocks
                        {value.block_size ? `, ${value.block_size} tokens each` : ""}
                        {left}
                    </span>
                }
            >
                {rows.length === 0 ? (
                    <Empty>Nothing is cached yet.</Empty>
                ) : (
                    <HeatMap rows={rows} workers={workers.map((worker) => worker.id)} tier={tier} />
                )}
            </Section>
            <Section title="Blocks per worker">
                <WorkerBlocks workers={workers} />
            </Section>
            <details class="card">
                <summary>Prefixes as a table</summary>
                <NodeTable rows={rows} />
            </details>
        </>
    );
}

/** Adds up the ranks of a worker: the tree does not tell them apart. */
function byWorker(rows: Caches["workers"]): ({ id: string } & TierBlocks)[] {
    const all = new Map<string, { id: string } & TierBlocks>();
    for (const { id, device, host, disk } of rows) {
        const sum = all.get(id) ?? { id, device: 0, host: 0, disk: 0 };
        all.set(id, { id, device: sum.device + device, host: sum.host + host, disk: sum.disk + disk });
    }
    return [...all.values()];
}

function WorkerBlocks({ workers }: { workers: readonly ({ id: string } & TierBlocks)[] }): JSX.Element {
    const most = Math.max(1, ...workers.map((worker) => worker.device + worker.host + worker.disk));
    const width = (value: number): { width: string } => ({ width: `${(value / most) * 100}%` });
    return (
        <Table
            caption="Blocks that each worker holds"
            rows={workers}
            keyOf={(worker) => worker.id}
            columns={[
                { title: "Worker", isName: true, cell: (worker) => workerName(worker.id) },
                {
                    title: "Share",
                    isWide: true,
                    cell: (worker) => (
                        <span class="meter full">
                            <span class="bar" aria-hidden="true">
                                <span class="fill device" style={width(worker.device)} />
                                <span class="fill host" style={width(worker.host)} />
                                <span class="fill disk" style={width(worker.disk)} />
                            </span>
                        </span>
                    ),
                },
                { title: "Device", isNumber: true, cell: (worker) => whole(worker.device) },
                { title: "Host memory", isNumber: true, cell: (worker) => whole(worker.host) },
                { title: "Disk", isNumber: true, cell: (worker) => whole(worker.disk) },
            ]}
        />
    );
}
