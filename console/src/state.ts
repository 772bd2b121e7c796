// Holds values that pages show, and tells their readers of changes at most once per frame.
import { useEffect, useState } from "preact/hooks";

export interface Store<T> {
    get(): T;
    set(value: T): void;
    subscribe(listener: () => void): () => void;
}

const waiting = new Set<() => void>();
let isScheduled = false;

function flush(): void {
    isScheduled = false;
    const now = [...waiting];
    waiting.clear();
    for (const listener of now) listener();
}

function schedule(listeners: Iterable<() => void>): void {
    for (const listener of listeners) waiting.add(listener);
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(flush);
}

export function store<T>(initial: T): Store<T> {
    let value = initial;
    const listeners = new Set<() => void>();
    return {
        get: () => value,
        set(next) {
            if (Object.is(next, value)) return;
            value = next;
            schedule(listeners);
        },
        subscribe(listener) {
            listeners.add(listener);
            return () => {
                listeners.delete(listener);
                waiting.delete(listener);
            };
        },
    };
}

export function useStore<T>(source: Store<T>): T {
    const [, redraw] = useState(0);
    useEffect(() => source.subscribe(() => redraw((n) => n + 1)), [source]);
    return source.get();
}

/** Returns rows with the new ones first, cut to a length. */
export function prepend<T>(rows: readonly T[], added: readonly T[], most: number): T[] {
    return [...added, ...rows].slice(0, most);
}
