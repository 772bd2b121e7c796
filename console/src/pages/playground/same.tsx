// The same request as a program.
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { useStore } from "../../state";
import { Code } from "../../ui/code";
import { Empty, Section, Segments } from "../../ui/parts";
import { asCurl, asPython, type Asked } from "./programs";
import { chatBody, completionBody, embeddingBody, pictureBody, rerankBody, userMessage } from "./request";
import { key, messagesOf, type Session } from "./session";

/** Returns the request as it would be sent, or why it cannot be built. */
function requestOf(tab: string, model: string, state: Session): Asked | string {
    const { talks, sampling, prompt, question, size, recording } = state;
    try {
        if (tab === "chat") {
            const said = messagesOf((talks[0] ?? []).slice(0, lastQuestion(talks[0] ?? [])));
            const body = chatBody(model, said.length === 0 ? [userMessage("Hello!", [])] : said, sampling);
            return { path: "v1/chat/completions", body };
        }
        if (tab === "completions")
            return { path: "v1/completions", body: completionBody(model, prompt || "Once upon a time", sampling) };
        if (tab === "embeddings") return { path: "v1/embeddings", body: embeddingBody(model, prompt || "A text") };
        if (tab === "rerank")
            return { path: "v1/rerank", body: rerankBody(model, question || "A question", prompt || "A document") };
        if (tab === "transcription")
            return { path: "v1/audio/transcriptions", body: { model }, file: recording?.name ?? "recording.wav" };
        return { path: "v1/images/generations", body: pictureBody(model, prompt || "A red square", size) };
    } catch (error) {
        return error instanceof Error ? error.message : String(error);
    }
}

function lastQuestion(turns: Session["talks"][number]): number {
    for (let i = turns.length; i > 0; i -= 1) if (turns[i - 1]!.by !== "model") return i;
    return 0;
}

export function Programs({
    tab,
    model,
    state,
    url,
}: {
    tab: string;
    model: string;
    state: Session;
    url: string;
}): JSX.Element {
    const [form, setForm] = useState("curl");
    const hasKey = useStore(key) !== "";
    const request = requestOf(tab, model, state);
    if (typeof request === "string")
        return (
            <Section title="The same request">
                <Empty>{request}</Empty>
            </Section>
        );
    const text = form === "curl" ? asCurl(url, request, hasKey) : asPython(url, request, hasKey);
    return (
        <Section
            title="The same request"
            aside={
                <Segments
                    label="Form"
                    value={form}
                    options={[
                        ["curl", "curl"],
                        ["python", "Python"],
                    ]}
                    onChoose={setForm}
                />
            }
        >
            <Code label={form === "curl" ? "Request with curl" : "Request with Python"} text={text} />
        </Section>
    );
}
