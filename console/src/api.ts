// Speaks with the console's server; every failure becomes a Failure that says what to do.

export class Failure extends Error {
    constructor(
        message: string,
        readonly status: number,
        readonly fix: string | null = null,
    ) {
        super(message);
    }
}

type Query = Record<string, string | number | null | undefined>;

export function address(path: string, query: Query = {}): string {
    const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const text = new URLSearchParams(pairs.map(([key, value]) => [key, String(value)])).toString();
    return text === "" ? path : `${path}?${text}`;
}

let onLoginNeeded: () => void = () => undefined;

export function whenLoginNeeded(call: () => void): void {
    onLoginNeeded = call;
}

export async function get<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
    const reply = await send(address(path, query), signal === undefined ? {} : { signal });
    return (await reply.json()) as T;
}

export async function post<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
    const reply = await send(path, { ...posting(body), ...(signal === undefined ? {} : { signal }) });
    const text = await reply.text();
    return (text === "" ? {} : JSON.parse(text)) as T;
}

export function posting(body: unknown, key = ""): RequestInit {
    const headers: Record<string, string> = { "Content-Type": "application/json", "X-Console": "1" };
    if (key !== "") headers["Authorization"] = `Bearer ${key}`;
    return { method: "POST", headers, body: JSON.stringify(body) };
}

/** A form with a file: the browser itself writes the content type. */
export function uploading(form: FormData, key = ""): RequestInit {
    const headers: Record<string, string> = { "X-Console": "1" };
    if (key !== "") headers["Authorization"] = `Bearer ${key}`;
    return { method: "POST", headers, body: form };
}

export async function send(path: string, init: RequestInit): Promise<Response> {
    let reply: Response;
    try {
        reply = await fetch(path, { credentials: "same-origin", ...init });
    } catch (error) {
        if (error instanceof DOMException && error.name === "AbortError") throw error;
        throw new Failure("The console's server does not answer.", 0, "Is serve still running?");
    }
    if (reply.ok) return reply;
    if (reply.status === 401 && !path.startsWith("v1/")) onLoginNeeded();
    throw await failure(reply);
}

async function failure(reply: Response): Promise<Failure> {
    const text = await reply.text().catch(() => "");
    try {
        const body = JSON.parse(text) as { error?: { message?: unknown; fix?: unknown } | string; message?: unknown };
        const said = typeof body.error === "object" ? body.error.message : (body.error ?? body.message);
        const fix = typeof body.error === "object" && typeof body.error.fix === "string" ? body.error.fix : null;
        if (typeof said === "string") return new Failure(said, reply.status, fix);
    } catch {
        // Not JSON: the text itself is the best there is.
    }
    const short = text.trim().slice(0, 300);
    return new Failure(short === "" ? `The answer has status ${reply.status}.` : short, reply.status);
}

export function isAbort(error: unknown): boolean {
    return error instanceof DOMException && error.name === "AbortError";
}

export function sentence(error: unknown): string {
    if (error instanceof Failure) return error.fix === null ? error.message : `${error.message} ${error.fix}`;
    return error instanceof Error ? error.message : String(error);
}
