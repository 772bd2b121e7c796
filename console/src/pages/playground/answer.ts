// Collects an answer from a stream or a whole reply: text, thinking, tools, tokens, pictures, times.
import { isAbort, posting, send, sentence } from "../../api";
import type { ToolCall } from "./request";

export interface Token {
    text: string;
    logprob: number;
    others: { text: string; logprob: number }[];
}

export interface Usage {
    prompt_tokens?: number;
    completion_tokens?: number;
    prompt_tokens_details?: { cached_tokens?: number | null } | null;
}

export interface Answer {
    id: string;
    text: string;
    thinking: string;
    tools: ToolCall[];
    tokens: Token[];
    pictures: string[];
    /** When each piece came, in ms after the request was sent. */
    times: number[];
    endMs: number | null;
    usage: Usage | null;
    finish: string | null;
    problem: string | null;
    isRunning: boolean;
}

export function emptyAnswer(): Answer {
    return {
        id: "",
        text: "",
        thinking: "",
        tools: [],
        tokens: [],
        pictures: [],
        times: [],
        endMs: null,
        usage: null,
        finish: null,
        problem: null,
        isRunning: true,
    };
}

interface Delta {
    content?: string | { type?: string; text?: string; image_url?: { url?: string } }[] | null;
    reasoning_content?: string | null;
    reasoning?: string | null;
    tool_calls?: { index?: number; id?: string; function?: { name?: string; arguments?: string } }[] | null;
}

interface LogprobEntry {
    token: string;
    logprob: number;
    top_logprobs?: { token: string; logprob: number }[];
}

interface Choice {
    delta?: Delta;
    message?: Delta;
    text?: string;
    finish_reason?: string | null;
    logprobs?: {
        content?: LogprobEntry[] | null;
        tokens?: string[];
        token_logprobs?: (number | null)[];
        top_logprobs?: (Record<string, number> | null)[];
    } | null;
}

export interface Chunk {
    id?: string;
    choices?: Choice[];
    usage?: Usage | null;
    error?: { message?: string } | string;
}

/** Takes one chunk, or a whole reply, into the answer. */
export function take(answer: Answer, chunk: Chunk, ms: number): void {
    if (chunk.error !== undefined)
        answer.problem =
            typeof chunk.error === "string" ? chunk.error : (chunk.error.message ?? "The stream ended with an error.");
    if (chunk.id !== undefined && answer.id === "") answer.id = chunk.id;
    if (chunk.usage) answer.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (choice === undefined) return;
    const part = choice.delta ?? choice.message ?? {};
    const before = answer.text.length + answer.thinking.length + answer.tools.length;
    takeContent(answer, choice.text ?? part.content);
    answer.thinking += part.reasoning_content ?? part.reasoning ?? "";
    const isTool = takeTools(answer, part.tool_calls);
    if (isTool || answer.text.length + answer.thinking.length + answer.tools.length > before) answer.times.push(ms);
    takeTokens(answer, choice.logprobs);
    if (choice.finish_reason) answer.finish = choice.finish_reason;
}

function takeContent(answer: Answer, content: Delta["content"]): void {
    if (typeof content === "string") answer.text += content;
    else if (Array.isArray(content)) {
        for (const part of content) {
            answer.text += part.text ?? "";
            if (part.image_url?.url !== undefined) addPicture(answer, part.image_url.url);
        }
    }
}

/** Only pictures inside the answer: the page loads nothing from elsewhere. */
export function addPicture(answer: Answer, url: string): void {
    if (/^data:image\/(png|jpeg|webp|gif);base64,/.test(url)) answer.pictures.push(url);
}

function takeTools(answer: Answer, calls: Delta["tool_calls"]): boolean {
    for (const [i, call] of (calls ?? []).entries()) {
        const index = call.index ?? i;
        const tool = (answer.tools[index] ??= { id: "", name: "", arguments: "" });
        tool.id = call.id ?? tool.id;
        tool.name += call.function?.name ?? "";
        tool.arguments += call.function?.arguments ?? "";
    }
    return (calls ?? []).length > 0;
}

function takeTokens(answer: Answer, logprobs: Choice["logprobs"]): void {
    if (!logprobs) return;
    for (const entry of logprobs.content ?? []) {
        answer.tokens.push({
            text: entry.token,
            logprob: entry.logprob,
            others: (entry.top_logprobs ?? []).map((one) => ({ text: one.token, logprob: one.logprob })),
        });
    }
    (logprobs.tokens ?? []).forEach((text, i) => {
        const others = Object.entries(logprobs.top_logprobs?.[i] ?? {}).map(([token, logprob]) => ({
            text: token,
            logprob,
        }));
        answer.tokens.push({ text, logprob: logprobs.token_logprobs?.[i] ?? 0, others });
    });
}

/** Sends the request and calls `changed` after every piece. Errors become part of the answer. */
export async function run(
    path: string,
    body: Record<string, unknown>,
    key: string,
    signal: AbortSignal,
    changed: (answer: Answer) => void,
): Promise<Answer> {
    const answer = emptyAnswer();
    const began = performance.now();
    const now = (): number => performance.now() - began;
    try {
        const reply = await send(path, { ...posting(body, key), signal });
        if (reply.headers.get("Content-Type")?.startsWith("text/event-stream") === true && reply.body !== null) {
            for await (const text of events(reply.body)) {
                if (text === "[DONE]") continue;
                take(answer, JSON.parse(text) as Chunk, now());
                changed(answer);
            }
        } else {
            take(answer, (await reply.json()) as Chunk, now());
        }
    } catch (error) {
        if (isAbort(error)) answer.finish = "stopped by you";
        else answer.problem = sentence(error);
    }
    answer.endMs = now();
    answer.isRunning = false;
    changed(answer);
    return answer;
}

/** Yields the data of each server-sent event. */
export async function* events(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
    const reader = body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    try {
        for (;;) {
            const { done, value } = await reader.read();
            rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
            const parts = rest.split(/\r?\n\r?\n/);
            rest = done ? "" : (parts.pop() ?? "");
            for (const part of parts) {
                const data = part
                    .split(/\r?\n/)
                    .filter((line) => line.startsWith("data:"))
                    .map((line) => line.slice(5).replace(/^ /, ""))
                    .join("\n");
                if (data !== "") yield data;
            }
            if (done) return;
        }
    } finally {
        // Who stops reading wants no more: the server learns of it.
        await reader.cancel().catch(() => undefined);
    }
}
