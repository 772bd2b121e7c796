// The shapes of what the console's server answers.

export type Kind = "chat" | "completions" | "embeddings" | "rerank" | "image" | "transcription";

export interface Model {
    name: string;
    kind: Kind;
    adapter_of: string | null;
    context: number | null;
}

export interface Settings {
    version: string | null;
    read_only: boolean;
    needs_login: boolean;
    logged_in?: boolean;
    /** What one logs in with, in words. */
    login_with?: string | null;
    url: string | null;
    namespace: string | null;
    run_folder: boolean;
    models: Model[];
    grafana: string | null;
    actions: string[];
}

export interface Process {
    name: string;
    kind: string;
    pid: number | null;
    state: string;
    since: number | null;
    /** What it does while it starts; "drained" if an operator stopped it. */
    phase?: string | null;
    group?: string | null;
    role?: string | null;
    restarts?: number | null;
    last_exit?: { reason: string; at: number } | null;
}

export interface Frontend {
    name?: string;
    url: string;
    ready: boolean;
    in_flight: number | null;
    requests_total: number | null;
    errors_total: number | null;
}

export interface Adapter {
    name: string;
    state: string;
    leases: number;
}

export interface Tier {
    tier: string;
    size_bytes?: number | null;
    used_bytes?: number | null;
    hit_tokens?: number | null;
    read_bytes?: number | null;
    written_bytes?: number | null;
}

export interface Worker {
    id: string;
    instance: string;
    process: string | null;
    /** Null while a worker does not answer. */
    role: string | null;
    state: string;
    models: string[];
    adapters: Adapter[];
    versions: Record<string, string>;
    host: string | null;
    pid: number | null;
    in_flight: number | null;
    uptime_seconds: number | null;
    ranks: Record<string, unknown>[];
    group?: string | null;
    requests_per_second?: number | null;
    tokens_per_second?: number | null;
    running?: number | null;
    waiting?: number | null;
    kv_used: number | null;
    hit_rate: number | null;
    tiers: Tier[];
    last_error: string | { message?: string; at?: number } | null;
}

export interface Edge {
    from: string;
    to: string;
    kind: "requests" | "kv" | "encoded";
    requests_per_second: number | null;
    tokens_per_second: number | null;
}

export interface Problem {
    what: string;
    why: string | null;
    fix: string | null;
    worker: string | null;
    severity: "error" | "warning";
}

export interface Totals {
    requests_per_second: number | null;
    tokens_per_second: number | null;
    in_flight: number | null;
    errors_per_second: number | null;
}

export interface Overview {
    at: number;
    processes: Process[];
    frontends: Frontend[];
    workers: Worker[];
    edges: Edge[];
    problems: Problem[];
    totals: Totals;
}

export type Numbers = (number | null)[];

export interface Percentiles {
    p50: Numbers;
    p90: Numbers;
    p99: Numbers;
}

export interface WorkerSeries {
    kv_used: Numbers;
    in_flight: Numbers;
    hit_rate: Numbers;
}

export interface Series {
    at: number[];
    requests_per_second: Numbers;
    output_tokens_per_second: Numbers;
    prompt_tokens_per_second: Numbers;
    in_flight: Numbers;
    errors_per_second: Numbers;
    goodput: Numbers;
    ttft_ms: Percentiles;
    itl_ms: Percentiles;
    workers: Record<string, WorkerSeries>;
}

export interface History {
    step_seconds: number;
    series: Series;
}

export interface RequestRow {
    id: string;
    at: number;
    model: string | null;
    adapter: string | null;
    tenant: string | null;
    input_tokens: number | null;
    output_tokens: number | null;
    cached_tokens: number | null;
    ttft_ms: number | null;
    total_ms: number | null;
    worker: string | null;
    prefill_worker: string | null;
    outcome: string;
    why: boolean;
}

export interface Candidate {
    worker: string;
    rank: number | null;
    overlap: { device: number; host: number; disk: number };
    active_requests: number;
    active_prefill_tokens: number;
    active_blocks: number;
    cost: number | null;
    is_chosen: boolean;
}

export interface Formula {
    overlap_weight: number;
    credit: number;
    host: number;
    disk: number;
    request_blocks: number;
}

export interface Decision {
    phase: "agg" | "prefill" | "decode";
    attempt: number;
    at: number;
    exact: boolean;
    block_size: number;
    prompt_blocks: number;
    formula: Formula | null;
    candidates: Candidate[];
    /** Why it is not exact. */
    notes?: string[];
}

export interface Span {
    what: string;
    from_ms: number;
    to_ms: number;
    worker: string | null;
}

export interface RequestDetail {
    request: RequestRow;
    decisions: Decision[];
    timeline: Span[];
}

export interface TierBlocks {
    device: number;
    host: number;
    disk: number;
}

export interface CacheNode {
    id: number;
    parent: number | null;
    blocks: number;
    depth: number;
    workers: Record<string, Partial<TierBlocks>>;
    used: number;
    last_used_seconds: number | null;
}

export interface Caches {
    at: number;
    block_size: number | null;
    blocks: number;
    workers: ({ id: string; rank?: number } & TierBlocks)[];
    tree: { nodes: CacheNode[]; left_out: number };
}

export interface LogFile {
    name: string;
    bytes: number;
    changed: number;
}

export interface LogLine {
    at_byte: number;
    text: string;
    level: string | null;
}

export interface LogPart {
    lines: LogLine[];
    from_byte: number;
    to_byte: number;
}

export interface ActionResult {
    worker: string | null;
    ok: boolean;
    said: string;
    reply: unknown;
}

export interface BenchRow {
    at: number;
    done: number;
    failed: number;
    requests_per_second: number | null;
    output_tokens_per_second: number | null;
    ttft_ms: number | null;
}

export interface Spread {
    p50: number | null;
    p90: number | null;
    p99: number | null;
}

export interface Stage {
    name: string;
    seconds: number;
    requests: { ok: number; failed: number; per_second: number };
    tokens: { prompt: number; cached: number | null; output: number; output_per_second: number };
    ttft_ms: Spread;
    itl_ms: Spread;
    e2e_ms: Spread;
}

export interface Bench {
    id: string | null;
    state: string;
    seconds: number | null;
    progress: BenchRow[];
    stages: Stage[];
    error: string | null;
}
