// Reads and writes the part of the address after #: a path, and what a page keeps there.
import { store } from "./state";

export interface Route {
    page: string;
    rest: string;
    query: URLSearchParams;
}

export function parse(hash: string): Route {
    const text = hash.replace(/^#\/?/, "");
    const [path = "", query = ""] = split(text, "?");
    const [page = "", rest = ""] = split(path, "/");
    return { page, rest: decode(rest), query: new URLSearchParams(query) };
}

function split(text: string, mark: string): [string, string] {
    const at = text.indexOf(mark);
    return at < 0 ? [text, ""] : [text.slice(0, at), text.slice(at + 1)];
}

function decode(text: string): string {
    try {
        return decodeURIComponent(text);
    } catch {
        return text;
    }
}

export function link(page: string, rest = "", query: Record<string, string> = {}): string {
    const path = rest === "" ? page : `${page}/${encodeURIComponent(rest)}`;
    const text = new URLSearchParams(query).toString();
    return `#/${path}${text === "" ? "" : `?${text}`}`;
}

export const route = store<Route>(parse(location.hash));

/** Changes what a page keeps in the address, without a step in the browser's history. */
export function keep(values: Record<string, string>): void {
    const { page, rest, query } = route.get();
    const all = { ...Object.fromEntries(query), ...values };
    const wanted = Object.fromEntries(Object.entries(all).filter(([, value]) => value !== ""));
    history.replaceState(null, "", link(page, rest, wanted));
    route.set(parse(location.hash));
}

window.addEventListener("hashchange", () => route.set(parse(location.hash)));
