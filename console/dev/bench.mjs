// Invents a load test: a row every quarter of a second, and figures at the end.
const ROW_MS = 250;
const NONE = { id: null, state: "idle", asked: null, seconds: null, progress: [], stages: [], error: null };

const spread = (p50) => ({ mean: p50, p50, p90: p50 * 1.6, p95: p50 * 1.8, p99: p50 * 2.1, max: p50 * 3 });

function stage(concurrency, seconds) {
    return {
        name: `c=${concurrency}`,
        seconds,
        requests: { ok: 176, failed: 0, unfinished: 0, per_second: 22.1 },
        tokens: { prompt: 45056, cached: 11264, cached_from: "usage", output: 11264, output_per_second: 1421 },
        ttft_ms: spread(14.5),
        itl_ms: spread(5.4),
        tpot_ms: spread(5.4),
        e2e_ms: spread(357),
        goodput: null,
        errors: {},
    };
}

function row(at) {
    return {
        at,
        done: at * 22,
        failed: 0,
        requests_per_second: 20 + 3 * Math.sin(at),
        output_tokens_per_second: 1400 + 90 * Math.sin(at),
        ttft_ms: 40 + 8 * Math.cos(at),
    };
}

export function makeBench(publish) {
    let state = NONE;
    let timer;
    const end = (how) => {
        clearInterval(timer);
        const stages = String(state.asked.concurrency).split(",");
        state = { ...state, state: how, stages: stages.map((one) => stage(one, state.seconds)) };
    };
    return {
        state: () => state,
        start(asked) {
            clearInterval(timer);
            state = { ...NONE, id: String(Date.now()), state: "running", asked, seconds: 0 };
            timer = setInterval(() => {
                const at = state.progress.length + 1;
                state = { ...state, seconds: at, progress: [...state.progress, row(at)] };
                if (at >= (asked.seconds ?? 8)) end("done");
                publish("bench", state);
            }, ROW_MS);
        },
        stop() {
            if (state.state !== "running") return;
            end("stopped");
            publish("bench", state);
        },
    };
}
