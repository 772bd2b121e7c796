// The small parts that every page is made of.
import type { ComponentChildren, JSX } from "preact";
import { useId } from "preact/hooks";
import { percent } from "../format";

type Tone = "good" | "warn" | "bad" | "idle";

const TONES: Record<string, Tone> = {
    ready: "good",
    running: "good",
    ok: "good",
    loaded: "good",
    done: "good",
    live: "good",
    active: "good",
    starting: "warn",
    "falling asleep": "warn",
    pausing: "warn",
    draining: "warn",
    loading: "warn",
    waiting: "warn",
    cancelled: "warn",
    unwell: "bad",
    "no answer": "bad",
    exited: "bad",
    stopped: "bad",
    failed: "bad",
    error: "bad",
    dead: "bad",
    lost: "bad",
};

export function tone(state: string): Tone {
    return TONES[state] ?? "idle";
}

/** A state as a word with a mark; the colour only repeats the word. */
export function State({ of }: { of: string }): JSX.Element {
    return <span class={`state ${tone(of)}`}>{of}</span>;
}

export function Meter({ value, label }: { value: number | null; label: string }): JSX.Element {
    if (value === null) return <span class="faint">–</span>;
    const level = value >= 0.95 ? "bad" : value >= 0.8 ? "warn" : "good";
    return (
        <span class="meter">
            <span class="bar" aria-hidden="true">
                <span class={`fill ${level}`} style={{ width: `${Math.min(100, value * 100)}%` }} />
            </span>
            <span class="num">
                <span class="hidden">{label} </span>
                {percent(value)}
            </span>
        </span>
    );
}

export function Stat({
    name,
    value,
    unit,
    children,
}: {
    name: string;
    value: string;
    unit?: string;
    children?: ComponentChildren;
}): JSX.Element {
    return (
        <div class="stat">
            <dt>{name}</dt>
            <dd>
                <span class="big">{value}</span>
                {unit === undefined ? null : <span class="faint"> {unit}</span>}
                {children}
            </dd>
        </div>
    );
}

export function Notice({
    tone: kind = "bad",
    title,
    children,
}: {
    tone?: Tone;
    title?: string;
    children?: ComponentChildren;
}): JSX.Element {
    return (
        <div class={`notice ${kind}`} role={kind === "bad" ? "alert" : undefined}>
            {title === undefined ? null : <strong>{title}</strong>}
            {children}
        </div>
    );
}

export function Empty({ children }: { children: ComponentChildren }): JSX.Element {
    return <p class="empty">{children}</p>;
}

export function Section({
    title,
    aside,
    children,
    id,
}: {
    title: string;
    aside?: ComponentChildren;
    children: ComponentChildren;
    id?: string;
}): JSX.Element {
    const own = useId();
    const name = id ?? own;
    return (
        <section class="card" aria-labelledby={name}>
            <div class="head">
                <h2 id={name}>{title}</h2>
                {aside}
            </div>
            {children}
        </section>
    );
}

interface FieldProps {
    label: string;
    hint?: string;
    wide?: boolean;
    children: (id: string) => ComponentChildren;
}

export function Field({ label, hint, wide, children }: FieldProps): JSX.Element {
    const id = useId();
    return (
        <div class={wide === true ? "field wide" : "field"}>
            <label for={id}>{label}</label>
            {children(id)}
            {hint === undefined ? null : <span class="hint">{hint}</span>}
        </div>
    );
}

interface ChoiceProps {
    label: string;
    value: string;
    options: readonly (readonly [value: string, text: string])[];
    onChoose: (value: string) => void;
    hint?: string;
    disabled?: boolean;
}

export function Choice({ label, value, options, onChoose, disabled = false, ...rest }: ChoiceProps): JSX.Element {
    return (
        <Field label={label} {...rest}>
            {(id) => (
                <select
                    id={id}
                    value={value}
                    disabled={disabled}
                    onChange={(event) => onChoose(event.currentTarget.value)}
                >
                    {options.map(([key, text]) => (
                        <option key={key} value={key} selected={key === value}>
                            {text}
                        </option>
                    ))}
                </select>
            )}
        </Field>
    );
}

interface InputProps {
    label: string;
    value: string;
    onInput: (value: string) => void;
    hint?: string;
    type?: "text" | "number" | "password" | "search";
    min?: number;
    max?: number;
    step?: number;
    placeholder?: string;
    required?: boolean;
    wide?: boolean;
}

export function Input({ label, value, onInput, hint, type = "text", wide, ...rest }: InputProps): JSX.Element {
    const more = { ...(hint === undefined ? {} : { hint }), ...(wide === undefined ? {} : { wide }) };
    return (
        <Field label={label} {...more}>
            {(id) => (
                <input
                    id={id}
                    type={type as "text"}
                    value={value}
                    autocomplete="off"
                    spellcheck={false}
                    onInput={(event) => onInput(event.currentTarget.value)}
                    {...rest}
                />
            )}
        </Field>
    );
}

export function Area({
    label,
    value,
    onInput,
    rows = 3,
    hint,
    mono = false,
}: {
    label: string;
    value: string;
    onInput: (value: string) => void;
    rows?: number;
    hint?: string;
    mono?: boolean;
}): JSX.Element {
    return (
        <Field label={label} wide {...(hint === undefined ? {} : { hint })}>
            {(id) => (
                <textarea
                    id={id}
                    rows={rows}
                    value={value}
                    class={mono ? "mono" : ""}
                    spellcheck={!mono}
                    onInput={(event) => onInput(event.currentTarget.value)}
                />
            )}
        </Field>
    );
}

export function Check({
    label,
    checked,
    onChange,
}: {
    label: string;
    checked: boolean;
    onChange: (value: boolean) => void;
}): JSX.Element {
    const id = useId();
    return (
        <div class="check">
            <input
                id={id}
                type="checkbox"
                checked={checked}
                onChange={(event) => onChange(event.currentTarget.checked)}
            />
            <label for={id}>{label}</label>
        </div>
    );
}

interface TabsProps {
    label: string;
    value: string;
    options: readonly (readonly [value: string, text: string])[];
    onChoose: (value: string) => void;
}

/** One choice of a few, as buttons in a row. */
export function Segments({ label, value, options, onChoose }: TabsProps): JSX.Element {
    return (
        <div class="segments" role="group" aria-label={label}>
            {options.map(([key, text]) => (
                <button key={key} type="button" aria-pressed={key === value} onClick={() => onChoose(key)}>
                    {text}
                </button>
            ))}
        </div>
    );
}
