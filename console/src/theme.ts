// Light, dark, or as the system says; and the page's colours for canvases, which cannot read variables.
import { store } from "./state";

export type Theme = "system" | "light" | "dark";

export const theme = store<Theme>(stored());
/** Changes whenever colours may have changed. */
export const colours = store(0);

function stored(): Theme {
    try {
        const value = localStorage.getItem("theme");
        return value === "light" || value === "dark" ? value : "system";
    } catch {
        return "system";
    }
}

function apply(value: Theme): void {
    if (value === "system") delete document.documentElement.dataset["theme"];
    else document.documentElement.dataset["theme"] = value;
    colours.set(colours.get() + 1);
}

export function choose(value: Theme): void {
    theme.set(value);
    apply(value);
    try {
        localStorage.setItem("theme", value);
    } catch {
        // Without storage the choice lasts as long as the page.
    }
}

export function start(): void {
    apply(theme.get());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => colours.set(colours.get() + 1));
}

let probe: HTMLElement | null = null;

/** Returns a variable of styles.css as a colour that a canvas understands. */
export function colour(name: string): string {
    if (probe === null) {
        probe = document.createElement("span");
        probe.hidden = true;
        document.body.append(probe);
    }
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
}

/** The colours of several lines in one chart, told apart also by their order in the legend. */
export const LINES = ["line-1", "line-2", "line-3", "line-4", "line-5", "line-6", "line-7", "line-8"] as const;

export function isCalm(): boolean {
    return matchMedia("(prefers-reduced-motion: reduce)").matches;
}
