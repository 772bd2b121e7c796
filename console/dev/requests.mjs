// Invents requests, the router's decisions about them, and the prefix tree.
import { dice, modelsOf, overviewOf } from "./deployment.mjs";
import { HOSTILE } from "./hostile.mjs";

const known = new Map();

/** The ids of workers by role; made once, as requests come a thousand times a second. */
function idsOf(options) {
    const key = `${options.scale}`;
    if (!known.has(key)) {
        const workers = overviewOf(options, 0).workers;
        const lists = Object.fromEntries(
            ["decode", "prefill"].map((role) => [role, workers.filter((worker) => worker.role === role)]),
        );
        known.set(key, (role) => lists[role]);
    }
    return known.get(key);
}

export function requestOf(options, number, at) {
    const roll = dice(number * 7919 + 1);
    const of = idsOf(options);
    const pick = (list) => list[Math.floor(roll() * list.length)]?.id ?? null;
    const input = Math.floor(80 + 3000 * roll() * roll());
    const prefill = 25 + input / 12;
    const output = Math.floor(10 + 300 * roll());
    return {
        id: `${(0x10000000 + number).toString(16)}-4f00-4a6b-9c1d-0123456789ab`,
        at,
        model: options.hostile && number % 5 === 0 ? modelsOf(options).at(-1).name : "demo-chat-8b",
        adapter: number % 4 === 0 ? "sql" : null,
        tenant: options.hostile && number % 3 === 0 ? HOSTILE : number % 2 === 0 ? "research" : null,
        input_tokens: input,
        output_tokens: output,
        cached_tokens: Math.floor((input * roll()) / 16) * 16,
        ttft_ms: prefill,
        total_ms: prefill + output * 11,
        worker: pick(of("decode")),
        prefill_worker: pick(of("prefill")),
        outcome: number % 37 === 0 ? "error" : number % 23 === 0 ? "cancelled" : "ok",
        why: number % 50 !== 0,
    };
}

export function detailOf(options, row) {
    const number = Number.parseInt(row.id.slice(0, 8), 16) - 0x10000000;
    const roll = dice(number + 5);
    const workers = overviewOf(options, 0).workers;
    const blocks = Math.ceil(row.input_tokens / 16);
    const formula = { overlap_weight: 16, credit: 1.5, host: 0.75, disk: 0.25, request_blocks: 256 };
    const decide = (phase, chosen) => {
        const candidates = workers
            .filter((worker) => worker.role === phase)
            .map((worker) => {
                const isChosen = worker.id === chosen;
                const device = phase === "decode" ? 0 : Math.floor(blocks * (isChosen ? 0.7 : 0.2 * roll()));
                const host = phase === "decode" ? 0 : Math.floor((blocks - device) * 0.3 * roll());
                const disk = phase === "decode" ? 0 : Math.floor((blocks - device - host) * 0.2 * roll());
                const active = Math.floor(isChosen ? 2 : 3 + 4 * roll());
                const tokens = phase === "decode" ? 0 : Math.floor(400 * roll());
                const held = phase === "prefill" ? 0 : Math.floor(active * 60 + 200 * roll());
                const left = tokens / 16 + blocks - formula.credit * device - formula.host * host - formula.disk * disk;
                const cost = (phase === "decode" ? 0 : 16 * Math.max(0, left)) + held + 256 * active;
                return {
                    worker: worker.id,
                    rank: 0,
                    overlap: { device, host, disk },
                    active_requests: active,
                    active_prefill_tokens: tokens,
                    active_blocks: held,
                    cost,
                    is_chosen: isChosen,
                };
            });
        return {
            phase,
            attempt: 1,
            at: row.at,
            exact: phase === "prefill",
            block_size: 16,
            prompt_blocks: blocks,
            formula,
            candidates,
        };
    };
    const first = row.ttft_ms;
    return {
        request: row,
        decisions: row.why ? [decide("prefill", row.prefill_worker), decide("decode", row.worker)] : [],
        timeline: [
            { what: "received", from_ms: 0, to_ms: 0, worker: null },
            { what: "queued", from_ms: 0, to_ms: first * 0.1, worker: null },
            { what: "routed", from_ms: first * 0.1, to_ms: first * 0.11, worker: row.prefill_worker },
            { what: "prefill", from_ms: first * 0.11, to_ms: first * 0.85, worker: row.prefill_worker },
            { what: "transfer", from_ms: first * 0.85, to_ms: first * 0.97, worker: row.worker },
            { what: "decode", from_ms: first * 0.97, to_ms: row.total_ms, worker: row.worker },
            { what: "ended", from_ms: row.total_ms, to_ms: row.total_ms, worker: null },
        ],
    };
}

export function cachesOf(options) {
    const roll = dice(11);
    const workers = overviewOf(options, 0).workers.filter(
        (worker) => worker.kv_used !== null && worker.role !== "omni",
    );
    const nodes = [];
    const most = options.scale === 0 ? 160 : 2000;
    for (let id = 0; id < most; id += 1) {
        const parent = id < 6 ? null : nodes[Math.floor(roll() * roll() * id)];
        const blocks = Math.max(1, Math.floor(2 ** (6 * roll())));
        const held = {};
        for (const worker of workers) {
            if (roll() > 12 / (workers.length + 12)) continue;
            const device = Math.floor(blocks * roll());
            const host = Math.floor((blocks - device) * roll());
            held[worker.id] = { device, host, disk: Math.floor((blocks - device - host) * roll()) };
        }
        nodes.push({
            id,
            parent: parent?.id ?? null,
            blocks,
            depth: parent === null ? 0 : parent.depth + parent.blocks,
            workers: held,
            used: Math.floor(200 / (1 + id * roll())),
            last_used_seconds: roll() < 0.1 ? null : Math.floor(3600 * roll() * roll()),
        });
    }
    const total = (id) =>
        Object.fromEntries(
            ["device", "host", "disk"].map((tier) => [
                tier,
                nodes.reduce((sum, node) => sum + (node.workers[id]?.[tier] ?? 0), 0),
            ]),
        );
    return {
        at: Date.now() / 1000,
        block_size: 16,
        blocks: nodes.reduce((sum, node) => sum + node.blocks, 0),
        workers: workers.map((worker) => ({ id: worker.id, ...total(worker.id) })),
        tree: { nodes, left_out: 731 },
    };
}
