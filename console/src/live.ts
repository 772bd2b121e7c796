// Keeps what the server reports by itself: the overview, samples, requests, the bench, actions.
import { get } from "./api";
import { prepend, store } from "./state";
import type { ActionResult, Overview, RequestRow, Settings } from "./types";

export type Connection = "waiting" | "live" | "lost";

export interface Sample {
    at: number;
    [figure: string]: unknown;
}

export interface Done {
    at: number;
    verb: string;
    results: ActionResult[];
}

export const settings = store<Settings | null>(null);
export const overview = store<Overview | null>(null);
export const connection = store<Connection>("waiting");
export const samples = store<Sample[]>([]);
export const recent = store<RequestRow[]>([]);
export const bench = store<unknown>(null);
export const actions = store<Done[]>([]);
/** When something was last heard, in ms of the page's clock. The overview itself comes only when it changed. */
export const heard = store(Date.now());

const MOST_ROWS = 300;
const MOST_SAMPLES = 150;
/** How long new requests are collected before the list changes: at 1000 per second nobody reads faster. */
const COLLECT_MS = 300;
const MANY = 30;
const COLLECT_MANY_MS = 1000;
const RETRY_MS = 4000;

let collected: RequestRow[] = [];
let timer = 0;
let wait = COLLECT_MS;

function collect(row: RequestRow): void {
    collected.push(row);
    if (collected.length > MOST_ROWS) collected = collected.slice(-MOST_ROWS);
    if (timer !== 0) return;
    timer = window.setTimeout(() => {
        timer = 0;
        const added = collected.reverse();
        collected = [];
        wait = added.length > MANY ? COLLECT_MANY_MS : COLLECT_MS;
        recent.set(merged(recent.get(), added));
    }, wait);
}

/** Returns rows with the new ones first; a row that comes again replaces the old one where it stands. */
export function merged(rows: readonly RequestRow[], added: readonly RequestRow[]): RequestRow[] {
    const newer = new Map(added.map((row) => [row.id, row]));
    const kept = rows.map((row) => {
        const again = newer.get(row.id);
        if (again !== undefined) newer.delete(row.id);
        return again ?? row;
    });
    return prepend(kept, [...newer.values()], MOST_ROWS);
}

/** Returns what people call a worker: the name of its process where that is known. */
export function workerName(id: string): string {
    return overview.get()?.workers.find((worker) => worker.id === id)?.process ?? id;
}

const ROLES = ["encode", "prefill", "decode"];
const names = new Intl.Collator("en", { numeric: true });

/** Returns it with its workers in the order in which a request meets them, then by name: ids are random. */
function inOrder(now: Overview): Overview {
    const workers = [...now.workers].sort(
        (a, b) =>
            ROLES.indexOf(a.role ?? "") - ROLES.indexOf(b.role ?? "") ||
            names.compare(a.process ?? a.id, b.process ?? b.id),
    );
    return { ...now, workers };
}

/** Listens until the returned function is called; comes back by itself after a break. */
export function listen(): () => void {
    let source: EventSource | null = null;
    let retry = 0;
    const open = (): void => {
        source = new EventSource("api/live");
        source.onopen = () => connection.set("live");
        source.onerror = () => {
            connection.set("lost");
            if (source?.readyState !== EventSource.CLOSED) return;
            retry = window.setTimeout(open, RETRY_MS);
        };
        on(source, "overview", (value) => overview.set(inOrder(value as Overview)));
        on(source, "sample", (value) => samples.set([...samples.get(), value as Sample].slice(-MOST_SAMPLES)));
        on(source, "request", (value) => collect(value as RequestRow));
        on(source, "bench", (value) => bench.set(value));
        on(source, "action", (value) => actions.set(prepend(actions.get(), [value as Done], 50)));
    };
    open();
    get<Overview>("api/overview").then(
        (first) => overview.get() ?? overview.set(inOrder(first)),
        () => undefined,
    );
    return () => {
        window.clearTimeout(retry);
        source?.close();
    };
}

function on(source: EventSource, name: string, take: (value: unknown) => void): void {
    source.addEventListener(name, (event) => {
        try {
            take(JSON.parse((event as MessageEvent<string>).data));
            heard.set(Date.now());
        } catch {
            // One bad message must not end the stream.
        }
    });
}
