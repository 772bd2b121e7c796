// Limits of a key or a tenant: fields, what is sent, and the flags of the command line.
import type { JSX } from "preact";
import { Input } from "../../ui/parts";

export interface Limits {
    requests_per_minute: number | null;
    tokens_per_minute: number | null;
    tokens_per_day: number | null;
    requests_at_a_time: number | null;
}

export type Typed = Partial<Record<keyof Limits, string>>;

const LIMITS: readonly (readonly [key: keyof Limits, label: string, flag: string])[] = [
    ["requests_per_minute", "Requests per minute", "requests-per-minute"],
    ["tokens_per_minute", "Tokens per minute", "tokens-per-minute"],
    ["tokens_per_day", "Tokens per day", "tokens-per-day"],
    ["requests_at_a_time", "Requests at a time", "concurrent"],
];

function given(typed: Typed): typeof LIMITS {
    return LIMITS.filter(([key]) => (typed[key] ?? "") !== "");
}

export function limitsBody(typed: Typed): Partial<Limits> {
    return Object.fromEntries(given(typed).map(([key]) => [key, Number(typed[key])]));
}

export function limitFlags(typed: Typed): string {
    return given(typed)
        .map(([key, , flag]) => ` --${flag} ${typed[key]}`)
        .join("");
}

interface LimitFieldsProps {
    typed: Typed;
    onChange: (typed: Typed) => void;
    placeholder: string;
    least: number;
}

export function LimitFields({ typed, onChange, placeholder, least }: LimitFieldsProps): JSX.Element {
    return (
        <>
            {LIMITS.map(([key, label]) => (
                <Input
                    key={key}
                    label={label}
                    type="number"
                    min={least}
                    value={typed[key] ?? ""}
                    placeholder={placeholder}
                    onInput={(value) => onChange({ ...typed, [key]: value })}
                />
            ))}
        </>
    );
}
