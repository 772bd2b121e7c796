// Shortens text to a width in pixels.

const context = document.createElement("canvas").getContext("2d");
const known = new Map<string, string>();
const MOST_KNOWN = 2000;

export function fit(text: string, width: number, font: string): string {
    const key = `${font}\n${Math.round(width)}\n${text}`;
    const before = known.get(key);
    if (before !== undefined) return before;
    if (known.size > MOST_KNOWN) known.clear();
    const short = shorten(text, width, font);
    known.set(key, short);
    return short;
}

function shorten(text: string, width: number, font: string): string {
    if (context === null) return text;
    context.font = font;
    if (context.measureText(text).width <= width) return text;
    let low = 0;
    let high = text.length;
    while (low < high) {
        const middle = Math.ceil((low + high) / 2);
        if (context.measureText(`${text.slice(0, middle)}…`).width <= width) low = middle;
        else high = middle - 1;
    }
    return `${text.slice(0, low)}…`;
}
