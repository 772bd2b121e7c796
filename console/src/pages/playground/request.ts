// Builds requests of the OpenAI API.

export interface Sampling {
    temperature: string;
    top_p: string;
    max_tokens: string;
    seed: string;
    stop: string;
    presence_penalty: string;
    frequency_penalty: string;
    logprobs: boolean;
    stream: boolean;
    tools: string;
    system: string;
    extra: string;
}

export const PLAIN: Sampling = {
    temperature: "0.7",
    top_p: "",
    max_tokens: "256",
    seed: "",
    stop: "",
    presence_penalty: "",
    frequency_penalty: "",
    logprobs: false,
    stream: true,
    tools: "",
    system: "",
    extra: "",
};

export type Part = { type: "text"; text: string } | { type: "image_url"; image_url: { url: string } };

export interface ToolCall {
    id: string;
    name: string;
    arguments: string;
}

export type Message =
    | { role: "system" | "user"; content: string | Part[] }
    | { role: "assistant"; content: string; tool_calls?: unknown[] }
    | { role: "tool"; content: string; tool_call_id: string };

export class BadField extends Error {}

function number(label: string, text: string): number | undefined {
    if (text.trim() === "") return undefined;
    const value = Number(text);
    if (!Number.isFinite(value)) throw new BadField(`${label} is not a number: ${text}`);
    return value;
}

function json(label: string, text: string): unknown {
    if (text.trim() === "") return undefined;
    try {
        return JSON.parse(text);
    } catch (error) {
        throw new BadField(`${label} is not JSON: ${error instanceof Error ? error.message : ""}`);
    }
}

/** Returns the fields that chat and completions share. */
function common(model: string, sampling: Sampling): Record<string, unknown> {
    const extra = json("More fields", sampling.extra);
    const stop = sampling.stop.split("\n").filter((line) => line !== "");
    const fields: Record<string, unknown> = {
        model,
        temperature: number("Temperature", sampling.temperature),
        top_p: number("Top p", sampling.top_p),
        max_tokens: number("Most tokens", sampling.max_tokens),
        seed: number("Seed", sampling.seed),
        presence_penalty: number("Presence penalty", sampling.presence_penalty),
        frequency_penalty: number("Frequency penalty", sampling.frequency_penalty),
        stop: stop.length === 0 ? undefined : stop,
        ...(sampling.stream ? { stream: true, stream_options: { include_usage: true } } : {}),
        ...(typeof extra === "object" && extra !== null ? extra : {}),
    };
    return Object.fromEntries(Object.entries(fields).filter(([, value]) => value !== undefined));
}

export function chatBody(model: string, messages: readonly Message[], sampling: Sampling): Record<string, unknown> {
    const tools = json("Tools", sampling.tools);
    const system: Message[] = sampling.system.trim() === "" ? [] : [{ role: "system", content: sampling.system }];
    return {
        ...common(model, sampling),
        messages: [...system, ...messages],
        ...(tools === undefined ? {} : { tools }),
        ...(sampling.logprobs ? { logprobs: true, top_logprobs: 5 } : {}),
    };
}

export function completionBody(model: string, prompt: string, sampling: Sampling): Record<string, unknown> {
    return { ...common(model, sampling), prompt, ...(sampling.logprobs ? { logprobs: 5 } : {}) };
}

export function userMessage(text: string, images: readonly string[]): Message {
    if (images.length === 0) return { role: "user", content: text };
    const parts: Part[] = images.map((url) => ({ type: "image_url", image_url: { url } }));
    return { role: "user", content: [...parts, ...(text === "" ? [] : [{ type: "text" as const, text }])] };
}

/** Returns the lines that have something in them. */
export function documentsOf(text: string): string[] {
    return text.split("\n").filter((line) => line.trim() !== "");
}

export function embeddingBody(model: string, text: string): Record<string, unknown> {
    return { model, input: documentsOf(text) };
}

export function rerankBody(model: string, question: string, text: string): Record<string, unknown> {
    return { model, query: question, documents: documentsOf(text) };
}

export const SIZES = ["256x256", "512x512", "768x768", "1024x1024"] as const;

export function pictureBody(model: string, prompt: string, size: string): Record<string, unknown> {
    return { model, prompt, size, n: 1, response_format: "b64_json" };
}
