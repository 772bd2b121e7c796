// Keeps what the server reports by itself: the overview, samples, requests, the bench, actions.
import { get } from "./api";
import { prepend, store } from "./state";
import type { ActionResult, Overview, RequestRow, Settings } from "./types";

export type Connection = "waiting" | "live" | "lost";

export interface Sample {
    at: number;
    [figure: string]: unknown;
}

/** What somebody did. Replies may have a secret, which is for the one who asked. */
export interface Done {
    at: number;
    verb: string;
    results: Omit<ActionResult, "reply">[];
}

export const settings = store<Settings | null>(null);
export const overview = store<Overview | null>(null);
export const connection = store<Connection>("waiting");
/** Counts the times that the stream began: what was missed before is to be loaded. */
export const opened = store(0);
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

/**
 * Listens until the returned function is called; comes back by itself after a break. A hidden page does not listen:
 * browsers have few connections to one server, which all its pages share.
 */
export function listen(): () => void {
    let source: EventSource | null = null;
    let retry = 0;
    const close = (): void => {
        window.clearTimeout(retry);
        source?.close();
        source = null;
        connection.set("waiting");
    };
    const open = (): void => {
        const made = new EventSource("api/live");
        source = made;
        made.onopen = () => {
            connection.set("live");
            actions.set([]); // the server tells the last ones again
            opened.set(opened.get() + 1);
        };
        made.onerror = () => {
            connection.set("lost");
            if (made.readyState === EventSource.CLOSED) retry = window.setTimeout(open, RETRY_MS);
        };
        on(made, "overview", (value) => overview.set(inOrder(value as Overview)));
        on(made, "sample", (value) => samples.set([...samples.get(), value as Sample].slice(-MOST_SAMPLES)));
        on(made, "request", (value) => collect(value as RequestRow));
        on(made, "bench", (value) => bench.set(value));
        on(made, "action", (value) => actions.set(prepend(actions.get(), [value as Done], 50)));
    };
    const follow = (): void => {
        if (document.hidden) close();
        else if (source === null) open();
    };
    document.addEventListener("visibilitychange", follow);
    follow();
    get<Overview>("api/overview").then(
        (first) => overview.get() ?? overview.set(inOrder(first)),
        () => undefined,
    );
    return () => {
        document.removeEventListener("visibilitychange", follow);
        close();
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
