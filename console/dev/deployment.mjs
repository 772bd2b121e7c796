// Invents a deployment: two prefill, two decode and one encode worker, or many; with names that try to be markup.
import { HOSTILE, HOSTILE_BASE } from "./hostile.mjs";

/** Numbers that look random and are the same in every run. */
export function dice(seed) {
    let state = seed >>> 0;
    return () => {
        state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
        return state / 2 ** 32;
    };
}

export function modelsOf({ hostile }) {
    const models = [
        { name: "demo-chat-8b", kind: "chat", adapter_of: null, context: 32768 },
        { name: "sql", kind: "chat", adapter_of: "demo-chat-8b", context: 32768 },
        { name: "demo-embed", kind: "embeddings", adapter_of: null, context: 8192 },
        { name: "demo-rerank", kind: "rerank", adapter_of: null, context: 8192 },
        { name: "demo-image", kind: "image", adapter_of: null, context: null },
        { name: "demo-speech", kind: "transcription", adapter_of: null, context: null },
    ];
    if (hostile) models.push({ name: HOSTILE, kind: "chat", adapter_of: HOSTILE_BASE, context: 4096 });
    return models;
}

function workerOf(i, role, roll, { hostile, at }) {
    const hex = Math.floor(roll() * 0xffffff)
        .toString(16)
        .padStart(6, "0");
    const kv = role === "encode" ? null : Math.min(0.99, 0.25 + 0.6 * roll() + 0.05 * Math.sin(at / 7 + i));
    const isOmni = role === "omni";
    return {
        id: hex,
        instance: String(7587890000000000000n + BigInt(i) * 1234567n),
        process: `worker-${i + 1}`,
        group: role,
        role,
        state: i === 4 && role === "decode" ? "asleep" : "ready",
        models: hostile && i === 0 ? [HOSTILE, "demo-chat-8b"] : [isOmni ? "demo-image" : "demo-chat-8b"],
        adapters:
            role === "encode" || isOmni
                ? []
                : [
                      { name: "sql", state: "loaded", leases: Math.floor(3 * roll()) },
                      ...(hostile ? [{ name: HOSTILE, state: "loading", leases: 0 }] : []),
                  ],
        versions: { dynamo_vllm: "0.27.0", vllm: "0.32.0", runtime: "1.6.1" },
        host: "127.0.0.1",
        pid: 41200 + i,
        in_flight: Math.floor(8 * roll() + 3 + 2 * Math.sin(at / 5 + i)),
        running: 6,
        waiting: 0,
        uptime_seconds: 5400 + i * 37 + (at % 3600),
        ranks:
            role === "decode"
                ? [
                      { rank: 0, kv_used: kv, running: 3, waiting: 0 },
                      { rank: 1, kv_used: kv, running: 4, waiting: 1 },
                  ]
                : [{ rank: 0, kv_used: kv, running: 3, waiting: 0 }],
        kv_used: kv,
        hit_rate: role === "encode" || isOmni ? null : 0.3 + 0.5 * roll(),
        tiers:
            role === "encode" || isOmni
                ? []
                : [
                      {
                          tier: "host",
                          size_bytes: 64e9,
                          used_bytes: 64e9 * (0.3 + 0.5 * roll()),
                          hit_tokens: 1.2e6 * roll(),
                          read_bytes: 3e10,
                          written_bytes: 9e10,
                      },
                      {
                          tier: "disk",
                          size_bytes: 1e12,
                          used_bytes: 1e12 * roll(),
                          hit_tokens: 4e5 * roll(),
                          read_bytes: 2e10,
                          written_bytes: 3e11,
                      },
                  ],
        last_error:
            i === 1 ? (hostile ? HOSTILE : "the engine refused a request: this model takes 32768 tokens") : null,
        requests_per_second: 12 * roll(),
        tokens_per_second: 900 * roll(),
    };
}

function rolesOf(scale) {
    if (scale === 0) return ["encode", "prefill", "prefill", "decode", "decode", "omni"];
    return Array.from({ length: scale }, (_, i) => (i % 10 === 0 ? "encode" : i % 3 === 0 ? "prefill" : "decode"));
}

export function overviewOf(options, at = Date.now() / 1000) {
    const roll = dice(7);
    const workers = rolesOf(options.scale).map((role, i) => workerOf(i, role, roll, { ...options, at }));
    const of = (role) => workers.filter((worker) => worker.role === role);
    const busy = 1 + 0.3 * Math.sin(at / 9);
    const edges = [];
    const add = (from, to, kind, requests, tokens) =>
        edges.push({ from, to, kind, requests_per_second: requests * busy, tokens_per_second: tokens * busy });
    for (const front of ["frontend", "frontend-2"]) {
        add("gateway", front, "requests", 18, 9200);
        for (const worker of of("encode")) add(front, worker.id, "requests", 1.4, 0);
        for (const worker of of("prefill")) add(front, worker.id, "requests", 9, 4600);
        for (const worker of of("decode")) add(front, worker.id, "requests", 9, 1400);
        for (const worker of of("omni")) add(front, worker.id, "requests", 0.2, 0);
    }
    for (const encode of of("encode"))
        for (const prefill of of("prefill").slice(0, 4)) add(encode.id, prefill.id, "encoded", 0.7, 0);
    for (const prefill of of("prefill").slice(0, 20))
        for (const decode of of("decode").slice(0, 20)) add(prefill.id, decode.id, "kv", 4.5, 2300);
    const name = options.hostile ? HOSTILE : "worker-2";
    return {
        at,
        processes: [
            { name: "gateway", kind: "gateway", pid: 41190, state: "running", since: at - 5400 },
            { name: "frontend", kind: "frontend", pid: 41191, state: "running", since: at - 5400 },
            { name: "frontend-2", kind: "frontend", pid: 41192, state: "running", since: at - 5400 },
            ...workers.map((worker) => ({
                name: worker.process,
                kind: "worker",
                pid: worker.pid,
                ...((options.drained ?? []).includes(worker.process)
                    ? { state: "stopped", phase: "drained" }
                    : { state: "ready", phase: "ready" }),
                group: worker.group,
                role: worker.role,
                restarts: worker.process === "worker-3" ? 1 : 0,
                last_exit: worker.process === "worker-3" ? { reason: "killed by signal 9", at: at - 900 } : null,
                since: at - worker.uptime_seconds,
            })),
        ],
        frontends: ["frontend", "frontend-2"].map((front, i) => ({
            name: front,
            url: `http://127.0.0.1:${8000 + i}`,
            ready: true,
            in_flight: 14 + i,
            requests_total: 91234,
            errors_total: 12,
        })),
        workers,
        edges,
        problems: options.calm
            ? []
            : [
                  {
                      what: `${name} preempts requests.`,
                      why: "Its KV cache is full, so requests are computed twice.",
                      fix: "a smaller --max-model-len, more memory for the cache, or one more worker",
                      worker: workers[1]?.id ?? null,
                      severity: "warning",
                  },
              ],
        totals: {
            requests_per_second: 36.4 * busy,
            tokens_per_second: 5600 * busy,
            in_flight: Math.round(29 * busy),
            errors_per_second: 0.02,
        },
    };
}

export function sampleOf(options, at) {
    const wave = 1 + 0.3 * Math.sin(at / 60) + 0.1 * Math.sin(at / 11);
    const { workers } = overviewOf(options, at);
    return {
        at,
        requests_per_second: 36 * wave,
        output_tokens_per_second: 5600 * wave,
        prompt_tokens_per_second: 18000 * wave,
        in_flight: Math.round(29 * wave),
        errors_per_second: Math.max(0, 0.05 * Math.sin(at / 40)),
        ttft_ms: { p50: 82 * wave, p90: 190 * wave, p99: 430 * wave * wave },
        itl_ms: { p50: 11 * wave, p90: 17 * wave, p99: 31 * wave },
        goodput: Math.min(1, 1.06 - 0.12 * wave),
        workers: Object.fromEntries(
            workers.map((worker) => [
                worker.id,
                { kv_used: worker.kv_used, in_flight: worker.in_flight, hit_rate: worker.hit_rate },
            ]),
        ),
    };
}

export function historyOf(options, seconds) {
    const now = Math.floor(Date.now() / 1000);
    const steps = Math.min(360, Math.max(2, Math.floor(seconds / 2)));
    const step = seconds / steps;
    const rows = Array.from({ length: steps }, (_, i) => sampleOf(options, now - seconds + (i + 1) * step));
    const hole = Math.floor(steps / 3);
    const list = (pick) => rows.map((row, i) => (i >= hole && i < hole + 4 ? null : pick(row)));
    const spread = (key) => ({
        p50: list((row) => row[key].p50),
        p90: list((row) => row[key].p90),
        p99: list((row) => row[key].p99),
    });
    const plain = [
        "requests_per_second",
        "output_tokens_per_second",
        "prompt_tokens_per_second",
        "in_flight",
        "errors_per_second",
        "goodput",
    ];
    return {
        step_seconds: step,
        series: {
            at: rows.map((row) => row.at),
            ...Object.fromEntries(plain.map((key) => [key, list((row) => row[key])])),
            ttft_ms: spread("ttft_ms"),
            itl_ms: spread("itl_ms"),
            workers: Object.fromEntries(
                Object.keys(rows[0].workers).map((id) => [
                    id,
                    Object.fromEntries(
                        ["kv_used", "in_flight", "hit_rate"].map((key) => [key, list((row) => row.workers[id][key])]),
                    ),
                ]),
            ),
        },
    };
}
