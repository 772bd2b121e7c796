// The logs of the run folder: one process at a time, filtered, followed.
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { get, isAbort, sentence } from "../api";
import { bytes } from "../format";
import { keep, link, route } from "../route";
import { useStore } from "../state";
import type { LogFile, LogLine, LogPart } from "../types";
import { useLoad } from "../ui/load";
import { Check, Choice, Empty, Input, Notice, Section } from "../ui/parts";

const PAGE = 500;
const MOST_LINES = 3000;
const FOLLOW_MS = 1500;
/** So near to its end a log is at its end. */
const END_PX = 4;
const LEVELS = [
    ["", "all levels"],
    ["debug", "debug and above"],
    ["info", "info and above"],
    ["warning", "warning and above"],
    ["error", "error and above"],
] as const;

interface Window {
    lines: LogLine[];
    from: number;
    to: number;
}

export function LogsPage(): JSX.Element {
    const { rest, query } = useStore(route);
    const { value, problem } = useLoad((signal) => get<{ logs: LogFile[] }>("api/logs", {}, signal), [], 10);
    if (value === null) return problem === null ? <Empty>Loading…</Empty> : <Notice>{problem}</Notice>;
    if (value.logs.length === 0)
        return (
            <Empty>There are no log files here: only a deployment that serve started on this machine has them.</Empty>
        );
    const file = value.logs.find((log) => log.name === rest || log.name === `${rest}.log`) ?? value.logs[0]!;
    const level = query.get("level") ?? "";
    const text = query.get("text") ?? "";
    return (
        <>
            <div class="bar-of">
                <Choice
                    label="Process"
                    value={file.name}
                    options={value.logs.map(
                        (log) => [log.name, `${log.name.replace(/\.log$/, "")} (${bytes(log.bytes)})`] as const,
                    )}
                    onChoose={(name) => {
                        location.hash = link("logs", name, Object.fromEntries(query));
                    }}
                />
                <Choice label="Level" value={level} options={LEVELS} onChoose={(chosen) => keep({ level: chosen })} />
                <Input
                    label="Text"
                    type="search"
                    value={text}
                    onInput={(typed) => keep({ text: typed })}
                    placeholder="part of a line"
                />
            </div>
            {problem === null ? null : <Notice>{problem}</Notice>}
            <Lines key={`${file.name} ${level} ${text}`} name={file.name} level={level} text={text} />
        </>
    );
}

function Lines({ name, level, text }: { name: string; level: string; text: string }): JSX.Element {
    const [shown, setShown] = useState<Window | null>(null);
    const [isFollowing, follow] = useState(true);
    const [problem, setProblem] = useState<string | null>(null);
    const box = useRef<HTMLDivElement>(null);
    const current = useRef<Window | null>(null);
    const lastTop = useRef(0);
    /** How many older lines came last, above those that were there. */
    const added = useRef(0);
    const ask = (query: Record<string, number>, signal?: AbortSignal): Promise<LogPart> =>
        get<LogPart>(`api/logs/${encodeURIComponent(name)}`, { limit: PAGE, level, text, ...query }, signal);
    const show = (next: Window): void => {
        current.current = next;
        setShown(next);
    };

    useEffect(() => {
        const stop = new AbortController();
        let timer = 0;
        const step = async (): Promise<void> => {
            try {
                const before = current.current;
                if (before === null) {
                    const part = await ask({}, stop.signal);
                    show({ lines: part.lines, from: part.from_byte, to: part.to_byte });
                } else if (isFollowing && !document.hidden) {
                    const part = await ask({ after: before.to }, stop.signal);
                    // A shorter file is a new one: the process began again.
                    if (part.to_byte < before.to) current.current = null;
                    else if (part.lines.length > 0 || part.to_byte > before.to) {
                        const lines = [...before.lines, ...part.lines];
                        const kept = lines.slice(-MOST_LINES);
                        const from = kept.length < lines.length ? kept[0]!.at_byte : before.from;
                        show({ lines: kept, from, to: part.to_byte });
                    }
                }
                setProblem(null);
            } catch (error) {
                if (isAbort(error)) return;
                setProblem(sentence(error));
            }
            timer = window.setTimeout(() => void step(), FOLLOW_MS);
        };
        const first = window.setTimeout(() => void step(), text === "" ? 0 : 250);
        return () => {
            stop.abort();
            window.clearTimeout(first);
            window.clearTimeout(timer);
        };
    }, [isFollowing]);
    // Before anybody can see, or scroll, the new lines.
    useLayoutEffect(() => {
        const parent = box.current;
        if (parent === null) return;
        const first = parent.children[added.current];
        if (isFollowing) parent.scrollTop = parent.scrollHeight;
        else if (added.current > 0 && first !== undefined)
            parent.scrollTop += first.getBoundingClientRect().top - parent.getBoundingClientRect().top;
        added.current = 0;
    }, [shown, isFollowing]);
    /** Who scrolls up reads; who comes to the end follows again. */
    const scrolled = (parent: HTMLElement): void => {
        const top = parent.scrollTop;
        if (parent.scrollHeight - top - parent.clientHeight < END_PX) follow(true);
        else if (top < lastTop.current) follow(false);
        lastTop.current = top;
    };

    const older = async (): Promise<void> => {
        if (shown === null) return;
        follow(false);
        try {
            const part = await ask({ before: shown.from });
            const lines = [...part.lines, ...shown.lines];
            added.current = part.lines.length;
            show({
                lines: lines.slice(0, MOST_LINES),
                from: part.from_byte,
                to: lines[MOST_LINES]?.at_byte ?? shown.to,
            });
        } catch (error) {
            setProblem(sentence(error));
        }
    };
    return (
        <Section title={name} aside={<Check label="Follow" checked={isFollowing} onChange={follow} />}>
            {problem === null ? null : <Notice>{problem}</Notice>}
            {shown !== null && shown.from > 0 && shown.lines.length < MOST_LINES ? (
                <button type="button" class="small" onClick={() => void older()}>
                    Show older lines
                </button>
            ) : null}
            {shown !== null && shown.lines.length === 0 ? (
                <Empty>{level === "" && text === "" ? "The log is empty." : "No line fits."}</Empty>
            ) : null}
            <div
                ref={box}
                class="log"
                role="region"
                aria-label={`Log of ${name}`}
                tabIndex={0}
                onScroll={(event) => scrolled(event.currentTarget)}
            >
                {(shown?.lines ?? []).map((line) => (
                    <LogRow key={line.at_byte} line={line} />
                ))}
            </div>
        </Section>
    );
}

const MARKS: Record<string, string> = {
    warning: "warn",
    warn: "warn",
    error: "bad",
    critical: "bad",
    debug: "idle",
    trace: "idle",
};

function LogRow({ line }: { line: LogLine }): JSX.Element {
    return <div class={`line ${MARKS[(line.level ?? "").toLowerCase()] ?? ""}`}>{line.text}</div>;
}
