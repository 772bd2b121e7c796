// Writes figures for people. A missing figure is a dash.

const NONE = "–";
type Figure = number | null | undefined;

function isMissing(value: Figure): value is null | undefined {
    return value === null || value === undefined || !Number.isFinite(value);
}

/** 0, 0.4, 12, 345, 1.2k, 34k, 5.6M */
export function count(value: Figure): string {
    if (isMissing(value)) return NONE;
    const size = Math.abs(value);
    if (size >= 999_500) return `${short(value / 1e6)}M`;
    if (size >= 999.5) return `${short(value / 1e3)}k`;
    return short(value);
}

function short(value: number): string {
    const size = Math.abs(value);
    if (size === 0) return "0";
    if (size < 0.1) return value.toFixed(2);
    return size < 9.95 && !Number.isInteger(value) ? value.toFixed(1) : value.toFixed(0);
}

export function whole(value: Figure): string {
    return isMissing(value) ? NONE : Math.round(value).toLocaleString("en");
}

export function percent(value: Figure): string {
    if (isMissing(value)) return NONE;
    const hundredths = value * 100;
    return `${hundredths > 0 && hundredths < 1 ? hundredths.toFixed(1) : hundredths.toFixed(0)} %`;
}

export function bytes(value: Figure): string {
    if (isMissing(value)) return NONE;
    const units = ["B", "KB", "MB", "GB", "TB", "PB"];
    let size = value;
    let unit = 0;
    while (size >= 1000 && unit < units.length - 1) {
        size /= 1000;
        unit += 1;
    }
    return `${unit === 0 || size >= 99.5 ? size.toFixed(0) : size.toFixed(1)} ${units[unit]}`;
}

export function milliseconds(value: Figure): string {
    if (isMissing(value)) return NONE;
    if (value === 0) return "0 ms";
    if (value >= 9950) return `${(value / 1000).toFixed(0)} s`;
    if (value >= 995) return `${(value / 1000).toFixed(2)} s`;
    return value >= 9.95 ? `${value.toFixed(0)} ms` : `${value.toFixed(1)} ms`;
}

export function duration(seconds: Figure): string {
    if (isMissing(seconds)) return NONE;
    const s = Math.max(0, Math.round(seconds));
    if (s < 60) return `${s} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function clock(unix: Figure): string {
    if (isMissing(unix)) return NONE;
    return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export function ago(unix: Figure): string {
    return isMissing(unix) ? NONE : `${duration(Date.now() / 1000 - unix)} ago`;
}

export function plural(n: number, one: string, many = `${one}s`): string {
    return `${whole(n)} ${n === 1 ? one : many}`;
}

export function sum(values: Iterable<Figure>): number {
    let total = 0;
    for (const value of values) total += value ?? 0;
    return total;
}
