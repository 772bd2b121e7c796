// Builds requests of the OpenAI API, and the same as curl and Python.

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

/** Shortens data URLs, which nobody wants to read or copy. */
function shortened(body: unknown): unknown {
    return JSON.parse(
        JSON.stringify(body, (_, value: unknown) =>
            typeof value === "string" && value.startsWith("data:") && value.length > 80
                ? `${value.slice(0, 40)}…`
                : value,
        ),
    );
}

export function asCurl(url: string, path: string, body: unknown, hasKey: boolean): string {
    const text = JSON.stringify(shortened(body), null, 2).replaceAll("'", `'\\''`);
    const key = hasKey ? ` \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
    return `curl ${url}/${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${text}'`;
}

const CALLS: Record<string, [call: string, known: readonly string[]]> = {
    "v1/chat/completions": [
        "chat.completions.create",
        [
            "model",
            "messages",
            "temperature",
            "top_p",
            "max_tokens",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "stream",
            "stream_options",
            "tools",
            "tool_choice",
            "logprobs",
            "top_logprobs",
            "response_format",
            "n",
        ],
    ],
    "v1/completions": [
        "completions.create",
        [
            "model",
            "prompt",
            "temperature",
            "top_p",
            "max_tokens",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
            "stream",
            "stream_options",
            "logprobs",
            "n",
        ],
    ],
    "v1/embeddings": ["embeddings.create", ["model", "input"]],
    "v1/images/generations": ["images.generate", ["model", "prompt", "n", "size", "response_format"]],
};

export function asPython(url: string, path: string, body: Record<string, unknown>, hasKey: boolean): string {
    const call = CALLS[path];
    const fields = shortened(body) as Record<string, unknown>;
    if (call === undefined) {
        return `import httpx\n\nreply = httpx.post(\n    "${url}/${path}",\n    json=${python(fields, 1)},\n    timeout=60,\n)\nprint(reply.json())`;
    }
    const [name, known] = call;
    const given = Object.entries(fields).filter(([key]) => known.includes(key));
    const extra = Object.fromEntries(Object.entries(fields).filter(([key]) => !known.includes(key)));
    const lines = given.map(([key, value]) => `    ${key}=${python(value, 1)},`);
    if (Object.keys(extra).length > 0) lines.push(`    extra_body=${python(extra, 1)},`);
    const client = `client = OpenAI(base_url="${url}/v1", api_key=${hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"'})`;
    const head = hasKey ? "import os\n\nfrom openai import OpenAI" : "from openai import OpenAI";
    return `${head}\n\n${client}\nanswer = client.${name}(\n${lines.join("\n")}\n)\n${reading(path, fields["stream"] === true)}`;
}

function reading(path: string, isStream: boolean): string {
    const isChat = path === "v1/chat/completions";
    if (isStream)
        return `for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].${isChat ? "delta.content" : "text"} or "", end="", flush=True)`;
    if (isChat) return "print(answer.choices[0].message.content)";
    return path === "v1/completions" ? "print(answer.choices[0].text)" : "print(answer)";
}

function python(value: unknown, depth: number): string {
    const pad = "    ".repeat(depth + 1);
    const end = "    ".repeat(depth);
    if (value === null || value === undefined) return "None";
    if (value === true) return "True";
    if (value === false) return "False";
    if (Array.isArray(value))
        return value.length === 0
            ? "[]"
            : `[\n${value.map((one) => `${pad}${python(one, depth + 1)},`).join("\n")}\n${end}]`;
    if (typeof value === "object") {
        const rows = Object.entries(value).map(
            ([key, one]) => `${pad}${JSON.stringify(key)}: ${python(one, depth + 1)},`,
        );
        return rows.length === 0 ? "{}" : `{\n${rows.join("\n")}\n${end}}`;
    }
    return JSON.stringify(value);
}
