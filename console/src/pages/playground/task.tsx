// One request and its outcome, for what does not stream.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { isAbort, posting, send, sentence, uploading } from "../../api";
import { milliseconds } from "../../format";
import { Notice } from "../../ui/parts";
import { key } from "./session";

export interface Task<T> {
    value: T | null;
    problem: string | null;
    isBusy: boolean;
    ms: number | null;
}

const NONE = { value: null, problem: null, isBusy: false, ms: null };

interface Use<T> {
    task: Task<T>;
    go: (path: string, body: unknown) => Promise<void>;
    stop: () => void;
}

/** Sends one request and keeps its outcome and its time. It ends with the part of the page that asked. */
export function useTask<T>(): Use<T> {
    const [task, set] = useState<Task<T>>(NONE);
    const stopper = useRef(new AbortController());
    const stop = (): void => {
        stopper.current.abort();
        set(NONE);
    };
    useEffect(() => () => stopper.current.abort(), []);
    const go = async (path: string, body: unknown): Promise<void> => {
        stopper.current.abort();
        stopper.current = new AbortController();
        const { signal } = stopper.current;
        set({ ...NONE, isBusy: true });
        const began = performance.now();
        const init = body instanceof FormData ? uploading(body, key.get()) : posting(body, key.get());
        try {
            const value = (await (await send(path, { ...init, signal })).json()) as T;
            set({ ...NONE, value, ms: performance.now() - began });
        } catch (error) {
            if (!isAbort(error)) set({ ...NONE, problem: sentence(error) });
        }
    };
    return { task, go, stop };
}

interface ButtonsProps {
    title: string;
    canGo: boolean;
    task: Task<unknown>;
    stop: () => void;
}

export function Buttons({ title, canGo, task, stop }: ButtonsProps): JSX.Element {
    return (
        <div class="buttons">
            <button type="submit" class="primary" disabled={task.isBusy || !canGo}>
                {title}
            </button>
            <button type="button" disabled={!task.isBusy} onClick={stop}>
                Stop
            </button>
        </div>
    );
}

export function Outcome({ task }: { task: Task<unknown> }): JSX.Element {
    return (
        <div role="status">
            {task.isBusy ? <p class="faint">Working…</p> : null}
            {task.problem === null ? null : <Notice>{task.problem}</Notice>}
            {task.ms === null ? null : <p class="faint">{milliseconds(task.ms)}</p>}
        </div>
    );
}
