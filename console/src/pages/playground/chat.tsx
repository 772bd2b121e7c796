// A conversation with one model, or the same one with two side by side.
import type { JSX } from "preact";
import { useRef, useState } from "preact/hooks";
import { bytes } from "../../format";
import { useStore } from "../../state";
import { Area, Empty, Notice } from "../../ui/parts";
import { AnswerView } from "./answer_view";
import { clear, sendChat, session, stop, type Turn } from "./session";

/** The server takes 16 MB; pictures grow by a third as text. */
const MOST_BYTES = 11e6;

export function Chat({ models }: { models: readonly string[] }): JSX.Element {
    const { talks, isRunning, problem } = useStore(session);
    return (
        <>
            <div class={models.length > 1 ? "panes two" : "panes"}>
                {models.map((model, i) => (
                    <Talk
                        key={i}
                        model={model}
                        turns={talks[i] ?? []}
                        models={models}
                        index={i}
                        isRunning={isRunning}
                    />
                ))}
            </div>
            {problem === null ? null : <Notice>{problem}</Notice>}
            <Compose models={models} isRunning={isRunning} />
            <p class="hidden" role="status">
                {isRunning ? "The model answers." : (talks[0] ?? []).length > 0 ? "The answer is complete." : ""}
            </p>
        </>
    );
}

function Talk({
    model,
    turns,
    models,
    index,
    isRunning,
}: {
    model: string;
    turns: readonly Turn[];
    models: readonly string[];
    index: number;
    isRunning: boolean;
}): JSX.Element {
    const last = turns.at(-1);
    const calls = !isRunning && last?.by === "model" ? last.answer.tools : [];
    return (
        <section class="talk" aria-label={`Conversation with ${model}`}>
            <h3 class="cut">{model}</h3>
            {turns.length === 0 ? <Empty>Nothing said yet.</Empty> : null}
            {turns.map((turn, i) => (
                <TurnView key={i} turn={turn} />
            ))}
            {calls.length === 0 ? null : (
                <ToolResults
                    key={turns.length}
                    calls={calls.map((call) => [call.id, call.name])}
                    onSend={(added) => void sendChat(models, (i) => (i === index ? added : []))}
                    isAlone={models.length === 1}
                />
            )}
        </section>
    );
}

function TurnView({ turn }: { turn: Turn }): JSX.Element {
    if (turn.by === "model")
        return (
            <div class="turn model">
                <AnswerView answer={turn.answer} />
            </div>
        );
    const images = turn.by === "user" ? turn.images : [];
    return (
        <div class={`turn ${turn.by}`}>
            <span class="who">{turn.by === "user" ? "You" : "Tool"}</span>
            {images.map((url, i) => (
                <img key={i} src={url} alt={`Picture ${i + 1} that you sent`} class="thumb" />
            ))}
            <div class="text">{turn.text}</div>
        </div>
    );
}

/** With one model the conversation can go on after a tool call: the user plays the tool. */
function ToolResults({
    calls,
    onSend,
    isAlone,
}: {
    calls: readonly (readonly [id: string, name: string])[];
    onSend: (turns: Turn[]) => void;
    isAlone: boolean;
}): JSX.Element | null {
    const [texts, setTexts] = useState<Record<string, string>>({});
    if (!isAlone) return null;
    return (
        <form
            onSubmit={(event) => {
                event.preventDefault();
                onSend(calls.map(([call]) => ({ by: "tool", call, text: texts[call] ?? "" })));
            }}
        >
            {calls.map(([id, name]) => (
                <Area
                    key={id}
                    label={`Result of ${name}`}
                    rows={1}
                    mono
                    value={texts[id] ?? ""}
                    onInput={(text) => setTexts({ ...texts, [id]: text })}
                />
            ))}
            <button type="submit" class="small">
                Send the result
            </button>
        </form>
    );
}

function Compose({ models, isRunning }: { models: readonly string[]; isRunning: boolean }): JSX.Element {
    const [text, setText] = useState("");
    const [images, setImages] = useState<string[]>([]);
    const [problem, setProblem] = useState<string | null>(null);
    const files = useRef<HTMLInputElement>(null);
    const go = (): void => {
        if (isRunning || (text.trim() === "" && images.length === 0)) return;
        const turn: Turn = { by: "user", text, images };
        setText("");
        setImages([]);
        void sendChat(models, () => [turn]);
    };
    const add = async (list: FileList | null | undefined): Promise<void> => {
        const chosen = [...(list ?? [])].filter((file) => file.type.startsWith("image/"));
        const urls = await Promise.all(chosen.map(dataUrl));
        const all = [...images, ...urls];
        const size = all.reduce((sum, url) => sum + url.length * 0.75, 0);
        if (size > MOST_BYTES) setProblem(`These pictures have ${bytes(size)}; at most ${bytes(MOST_BYTES)} fit.`);
        else {
            setProblem(null);
            setImages(all);
        }
        if (files.current !== null) files.current.value = "";
    };
    return (
        <form
            class="compose"
            onSubmit={(event) => {
                event.preventDefault();
                go();
            }}
        >
            <div
                onKeyDown={(event) => {
                    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) go();
                }}
                onPaste={(event) => {
                    if (event.clipboardData?.files.length) void add(event.clipboardData.files);
                }}
            >
                <Area label="Message" rows={3} value={text} onInput={setText} hint="Ctrl+Enter sends" />
            </div>
            {images.length === 0 ? null : (
                <ul class="plain thumbs">
                    {images.map((url, i) => (
                        <li key={i}>
                            <img src={url} alt={`Picture ${i + 1}`} class="thumb" />
                            <button
                                type="button"
                                class="small"
                                aria-label={`Remove picture ${i + 1}`}
                                onClick={() => setImages(images.filter((_, k) => k !== i))}
                            >
                                Remove
                            </button>
                        </li>
                    ))}
                </ul>
            )}
            {problem === null ? null : <Notice>{problem}</Notice>}
            <div class="buttons">
                <button
                    type="submit"
                    class="primary"
                    disabled={isRunning || (text.trim() === "" && images.length === 0)}
                >
                    Send
                </button>
                <button type="button" disabled={!isRunning} onClick={stop}>
                    Stop
                </button>
                <label class="button">
                    Add pictures
                    <input
                        ref={files}
                        type="file"
                        accept="image/*"
                        multiple
                        class="hidden"
                        onChange={(event) => void add(event.currentTarget.files)}
                    />
                </label>
                <span class="push" />
                <button type="button" onClick={clear}>
                    Clear
                </button>
            </div>
        </form>
    );
}

function dataUrl(file: File): Promise<string> {
    return new Promise((resolve, reject) => {
        const reader = new FileReader();
        reader.onload = () => resolve(String(reader.result));
        reader.onerror = () => reject(new Error(`${file.name} cannot be read`));
        reader.readAsDataURL(file);
    });
}
