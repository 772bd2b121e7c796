// Writes a request as a program that sends the same: curl and Python.
import { quoted } from "../operate/verbs";

/** A request as it is sent; with the name of a file if it is a form. */
export interface Asked {
    path: string;
    body: Record<string, unknown>;
    file?: string;
}

/** A picture in a body, which the program reads from a file: nobody wants to read or copy it as text. */
class Picture {
    constructor(
        readonly file: string,
        readonly type: string,
    ) {}
}

const PICTURE = /^data:(image\/([a-z0-9.+-]+));base64,/;

/** Puts files in the place of the pictures of a chat. All else stays, also text that looks like one. */
function withFiles(body: Record<string, unknown>): { body: Record<string, unknown>; files: string[] } {
    const made = new Map<string, Picture>();
    const fileOf = (url: string): Picture | string => {
        const [, type, ending] = PICTURE.exec(url) ?? [];
        if (type === undefined) return url;
        const picture = made.get(url) ?? new Picture(`picture-${made.size + 1}.${ending}`, type);
        made.set(url, picture);
        return picture;
    };
    const partOf = (part: { type: string; image_url?: { url: string } }): unknown =>
        part.type === "image_url" && part.image_url !== undefined
            ? { ...part, image_url: { ...part.image_url, url: fileOf(part.image_url.url) } }
            : part;
    const messages = (body["messages"] ?? []) as { content: unknown }[];
    const written = messages.map((message) =>
        Array.isArray(message.content) ? { ...message, content: message.content.map(partOf) } : message,
    );
    return {
        body: { ...body, ...(messages.length === 0 ? {} : { messages: written }) },
        files: [...made.values()].map((picture) => picture.file),
    };
}

function about(files: readonly string[]): string {
    if (files.length === 0) return "";
    return `# Save your pictures as ${files.join(", ")} first.\n`;
}

export function asCurl(url: string, { path, body, file }: Asked, hasKey: boolean): string {
    const key = hasKey ? ` \\\n  -H "Authorization: Bearer $OPENAI_API_KEY"` : "";
    if (file !== undefined) {
        // In quotes of its own, as curl reads more than a name after a semicolon or comma.
        const name = `file=@"${file.replaceAll(/[\\"]/g, "\\$&")}"`;
        const fields = Object.entries(body).map(
            ([name, value]) => ` \\\n  --form-string ${quoted(`${name}=${value}`)}`,
        );
        return `curl ${url}/${path}${key} \\\n  -F ${quoted(name)}${fields.join("")}`;
    }
    const start = `curl ${url}/${path} \\\n  -H 'Content-Type: application/json'${key} \\\n  `;
    const { body: written, files } = withFiles(body);
    if (files.length === 0) return `${start}-d '${JSON.stringify(body, null, 2).replaceAll("'", `'\\''`)}'`;
    // Pictures are too long for a command line. The shell puts them where the marks are, which are nowhere else.
    let mark = "PICTURE";
    const words = JSON.stringify(written);
    while (words.includes(mark)) mark += "_";
    const marked = (_: string, value: unknown): unknown =>
        value instanceof Picture ? `data:${value.type};base64,${mark}(${value.file})` : value;
    const text = JSON.stringify(written, marked, 2)
        .replaceAll(/[\\$`]/g, "\\$&")
        .replaceAll(new RegExp(`${mark}\\(([^)]*)\\)`, "g"), "$(base64 < $1 | tr -d '\\n')");
    return `${about(files)}${start}-d @- <<${mark}\n${text}\n${mark}`;
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
    "v1/audio/transcriptions": ["audio.transcriptions.create", ["model"]],
    "v1/images/generations": ["images.generate", ["model", "prompt", "n", "size", "response_format"]],
};

const DATA_URL = `

def data_url(file: str, kind: str) -> str:
    return f"data:{kind};base64," + base64.b64encode(Path(file).read_bytes()).decode()
`;

export function asPython(url: string, { path, body, file }: Asked, hasKey: boolean): string {
    const key = hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"';
    const call = CALLS[path];
    if (call === undefined) {
        const head = hasKey ? "import os\n\nimport httpx" : "import httpx";
        const headers = hasKey ? `    headers={"Authorization": "Bearer " + ${key}},\n` : "";
        return `${head}\n\nreply = httpx.post(\n    "${url}/${path}",\n${headers}    json=${python(body, 1)},\n    timeout=60,\n)\nprint(reply.json())`;
    }
    const { body: fields, files } = withFiles(body);
    const [name, known] = call;
    const given = Object.entries(fields).filter(([key]) => known.includes(key));
    const extra = Object.fromEntries(Object.entries(fields).filter(([key]) => !known.includes(key)));
    const lines = given.map(([key, value]) => `    ${key}=${python(value, 1)},`);
    if (file !== undefined) lines.push(`    file=open(${JSON.stringify(file)}, "rb"),`);
    if (Object.keys(extra).length > 0) lines.push(`    extra_body=${python(extra, 1)},`);
    const standard = [
        ...(files.length > 0 ? ["import base64"] : []),
        ...(hasKey ? ["import os"] : []),
        ...(files.length > 0 ? ["from pathlib import Path"] : []),
    ];
    const head = [...standard, ...(standard.length > 0 ? [""] : []), "from openai import OpenAI"].join("\n");
    const helper = files.length > 0 ? `${DATA_URL}\n` : "";
    const client = `client = OpenAI(base_url="${url}/v1", api_key=${key})`;
    return `${about(files)}${head}\n${helper}\n${client}\nanswer = client.${name}(\n${lines.join("\n")}\n)\n${reading(path, fields["stream"] === true)}`;
}

function reading(path: string, isStream: boolean): string {
    const isChat = path === "v1/chat/completions";
    if (isStream)
        return `for chunk in answer:\n    if chunk.choices:\n        print(chunk.choices[0].${isChat ? "delta.content" : "text"} or "", end="", flush=True)`;
    if (path === "v1/audio/transcriptions") return "print(answer.text)";
    if (isChat) return "print(answer.choices[0].message.content)";
    return path === "v1/completions" ? "print(answer.choices[0].text)" : "print(answer)";
}

function python(value: unknown, depth: number): string {
    const pad = "    ".repeat(depth + 1);
    const end = "    ".repeat(depth);
    if (value instanceof Picture) return `data_url(${JSON.stringify(value.file)}, ${JSON.stringify(value.type)})`;
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
