// Shows an answer: thinking folded, text or tokens with their probabilities, tools, pictures, times.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { milliseconds, percent, plural, whole } from "../../format";
import { link } from "../../route";
import { useStore } from "../../state";
import { colour, colours } from "../../theme";
import type { Answer, Token } from "./answer";
import type { ToolCall } from "./request";

export function AnswerView({ answer }: { answer: Answer }): JSX.Element {
    return (
        <div class="answer" aria-busy={answer.isRunning}>
            {answer.thinking === "" ? null : (
                <details class="thinking">
                    <summary>Thinking{answer.text === "" && answer.isRunning ? "…" : ""}</summary>
                    <div class="text">{answer.thinking}</div>
                </details>
            )}
            {answer.tokens.length > 0 ? (
                <Tokens tokens={answer.tokens} />
            ) : answer.text === "" ? null : (
                <div class="text">{answer.text}</div>
            )}
            {answer.isRunning && answer.times.length === 0 ? <p class="faint">Waiting for the first token…</p> : null}
            {answer.tools.map((tool, i) => (
                <ToolView key={tool.id || i} tool={tool} />
            ))}
            {answer.pictures.map((url, i) => (
                <img key={url.slice(-40)} src={url} alt={`Picture ${i + 1} of the answer`} class="picture" />
            ))}
            {answer.problem === null ? null : (
                <p class="said bad" role="alert">
                    {answer.problem}
                </p>
            )}
            <Timing answer={answer} />
        </div>
    );
}

function ToolView({ tool }: { tool: ToolCall }): JSX.Element {
    return (
        <div class="tool">
            <span class="faint">calls</span> <strong>{tool.name}</strong>
            <pre>{pretty(tool.arguments)}</pre>
        </div>
    );
}

function pretty(text: string): string {
    try {
        return JSON.stringify(JSON.parse(text), null, 2);
    } catch {
        return text;
    }
}

/** Tokens, marked where the model was unsure. Arrow keys move between them; only one is a tab stop. */
function Tokens({ tokens }: { tokens: readonly Token[] }): JSX.Element {
    const [at, setAt] = useState(-1);
    const box = useRef<HTMLDivElement>(null);
    const move = (event: KeyboardEvent): void => {
        const by = { ArrowRight: 1, ArrowLeft: -1, Home: -tokens.length, End: tokens.length }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        const next = Math.max(0, Math.min(tokens.length - 1, at + by));
        box.current?.querySelectorAll<HTMLElement>("[data-token]")[next]?.focus();
    };
    const chosen = tokens[at];
    return (
        <>
            <div
                ref={box}
                class="text tokens"
                role="group"
                aria-label="Answer by tokens; arrow keys move between them"
                onKeyDown={move}
            >
                {tokens.map((token, i) => (
                    <span
                        key={i}
                        data-token={i}
                        role="img"
                        aria-label={`${token.text}, ${percent(Math.exp(token.logprob))}`}
                        tabIndex={i === Math.max(0, at) ? 0 : -1}
                        class={`token ${sureness(token.logprob)}`}
                        onFocus={() => setAt(i)}
                        onMouseEnter={() => setAt(i)}
                    >
                        {token.text}
                    </span>
                ))}
            </div>
            <div class="readout">
                {chosen === undefined ? (
                    "Point at a token, or move to it with the keyboard, to see its probability."
                ) : (
                    <>
                        <strong class="mono">{JSON.stringify(chosen.text)}</strong> {percent(Math.exp(chosen.logprob))}
                        {chosen.others.length === 0 ? null : (
                            <span class="faint">
                                {" "}
                                of{" "}
                                {chosen.others
                                    .map((one) => `${JSON.stringify(one.text)} ${percent(Math.exp(one.logprob))}`)
                                    .join(", ")}
                            </span>
                        )}
                    </>
                )}
            </div>
        </>
    );
}

function sureness(logprob: number): string {
    const p = Math.exp(logprob);
    return p >= 0.9 ? "sure" : p >= 0.5 ? "likely" : p >= 0.2 ? "unsure" : "doubtful";
}

function Timing({ answer }: { answer: Answer }): JSX.Element | null {
    const { times, usage, endMs } = answer;
    if (times.length === 0) return null;
    const gaps = times.slice(1).map((ms, i) => ms - times[i]!);
    const sorted = [...gaps].sort((a, b) => a - b);
    const tokens = usage?.completion_tokens ?? null;
    const span = (times.at(-1) ?? 0) - times[0]!;
    const facts = [
        `first token ${milliseconds(times[0])}`,
        gaps.length === 0
            ? null
            : `gaps ${milliseconds(sorted[Math.floor(sorted.length / 2)])} median, ${milliseconds(sorted.at(-1))} longest`,
        tokens === null || span <= 0 ? null : `${whole(tokens / (span / 1000))} tokens/s`,
        tokens === null ? null : plural(tokens, "token"),
        usage?.prompt_tokens === undefined
            ? null
            : `${plural(usage.prompt_tokens, "prompt token")}${cachedText(answer)}`,
        endMs === null ? null : `${milliseconds(endMs)} in all`,
        answer.finish === null ? null : `ended: ${answer.finish}`,
    ].filter((fact) => fact !== null);
    const request = answer.id.replace(/^(chatcmpl|cmpl)-/, "");
    return (
        <div class="timing">
            {gaps.length < 2 ? null : <Gaps first={times[0]!} gaps={gaps} />}
            <p class="faint">
                {facts.join(" · ")}
                {answer.isRunning || request === "" ? null : (
                    <>
                        {" "}
                        · <a href={link("requests", request)}>Why there?</a>
                    </>
                )}
            </p>
        </div>
    );
}

function cachedText({ usage }: Answer): string {
    const cached = usage?.prompt_tokens_details?.cached_tokens;
    return cached === undefined || cached === null ? "" : ` (${whole(cached)} cached)`;
}

const HEIGHT = 34;
const MOST_BARS = 400;

/** A bar for each gap between pieces of the answer; the first one, in another colour, is the wait before it. */
function Gaps({ first, gaps }: { first: number; gaps: readonly number[] }): JSX.Element {
    const canvas = useRef<HTMLCanvasElement>(null);
    const version = useStore(colours);
    const longest = Math.max(...gaps);
    useEffect(() => {
        const frame = requestAnimationFrame(() => {
            const pen = canvas.current?.getContext("2d");
            if (!pen || canvas.current === null) return;
            const scale = window.devicePixelRatio || 1;
            const width = canvas.current.clientWidth;
            canvas.current.width = width * scale;
            canvas.current.height = HEIGHT * scale;
            pen.scale(scale, scale);
            const shown = gaps.slice(-MOST_BARS);
            const step = Math.min(6, width / (shown.length + 2));
            const most = Math.max(longest, first);
            const bar = (i: number, ms: number, ink: string): void => {
                const height = Math.max(1, (Math.sqrt(ms) / Math.sqrt(most)) * (HEIGHT - 2));
                pen.fillStyle = ink;
                pen.fillRect(i * step, HEIGHT - height, Math.max(1, step - 1), height);
            };
            bar(0, first, colour("line-2"));
            const ink = colour("line-1");
            shown.forEach((ms, i) => bar(i + 1, ms, ink));
        });
        return () => cancelAnimationFrame(frame);
    }, [gaps.length, version]);
    return (
        <canvas
            ref={canvas}
            class="gaps"
            role="img"
            aria-label={`Time before each token: the first ${milliseconds(first)}, then at most ${milliseconds(longest)}`}
        />
    );
}
