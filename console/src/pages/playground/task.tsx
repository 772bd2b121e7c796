// One request and its outcome, for what does not stream.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { posting, send, sentence, uploading } from "../../api";
import { milliseconds } from "../../format";
import { Notice } from "../../ui/parts";
import { key } from "./session";

export interface Task<T> {
    value: T | null;
    problem: string | null;
    isBusy: boolean;
    ms: number | null;
}

/** Sends one request and keeps its outcome and its time. */
export function useTask<T>(): [Task<T>, (path: string, body: unknown) => Promise<void>] {
    const [task, set] = useState<Task<T>>({ value: null, problem: null, isBusy: false, ms: null });
    const go = async (path: string, body: unknown): Promise<void> => {
        set({ value: null, problem: null, isBusy: true, ms: null });
        const began = performance.now();
        try {
            const value = (await (
                await send(path, body instanceof FormData ? uploading(body, key.get()) : posting(body, key.get()))
            ).json()) as T;
            set({ value, problem: null, isBusy: false, ms: performance.now() - began });
        } catch (error) {
            set({ value: null, problem: sentence(error), isBusy: false, ms: null });
        }
    };
    return [task, go];
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
