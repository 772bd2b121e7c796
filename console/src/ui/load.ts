// Loads something when a page opens, and again when its parts change.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { isAbort, sentence } from "../api";

export interface Loaded<T> {
    value: T | null;
    problem: string | null;
    again: () => void;
}

/**
 * `seconds` repeats it while the page is visible, without an end or until the first answer; what was there stays until
 * the next one.
 */
export function useLoad<T>(
    load: (signal: AbortSignal) => Promise<T>,
    parts: readonly unknown[],
    seconds = 0,
    until: "ever" | "known" = "ever",
): Loaded<T> {
    const [value, setValue] = useState<T | null>(null);
    const [problem, setProblem] = useState<string | null>(null);
    const [round, setRound] = useState(0);
    const current = useRef(load);
    current.current = load;
    useEffect(() => {
        const stop = new AbortController();
        let timer = 0;
        const run = async (): Promise<void> => {
            try {
                if (!document.hidden || seconds === 0) {
                    setValue(await current.current(stop.signal));
                    setProblem(null);
                    if (until === "known") return;
                }
            } catch (error) {
                if (isAbort(error)) return;
                setProblem(sentence(error));
            }
            if (seconds > 0 && !stop.signal.aborted) timer = window.setTimeout(() => void run(), seconds * 1000);
        };
        void run();
        return () => {
            stop.abort();
            window.clearTimeout(timer);
        };
    }, [...parts, round, seconds]);
    return { value, problem, again: useCallback(() => setRound((n) => n + 1), []) };
}
