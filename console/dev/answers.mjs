// Answers of the OpenAI API: streams, tools, thinking, vectors, a picture.

const WORDS =
    "The router sends a request to the worker that has the longest part of its prompt in the cache, unless that worker has much more to do than another one. Then a little is computed twice, and everybody waits less.".split(
        " ",
    );
const PICTURE =
    "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAIAAABLbSncAAAAbUlEQVR42hXOUREAUQhCUaMYhShEMcqNQhSi7Fs/OQzjzLCDBg83MGToMLPsosXLLSxZug/ECgmLE4iI6oFZI2NzBhNTPzj20OHjDo4cvQf/7Bt41Rf+F+h7YsIGBYfLHyc0D8oWFZfrX05p+QDeqGABtJu0bQAAAABJRU5ErkJggg==";
const GAP_MS = 12;

function entry(token, i) {
    const p = [0.97, 0.72, 0.41, 0.12, 0.99][i % 5];
    return {
        token,
        logprob: Math.log(p),
        top_logprobs: [
            { token, logprob: Math.log(p) },
            { token: " other", logprob: Math.log((1 - p) * 0.6) },
            { token: "<b>x</b>", logprob: Math.log((1 - p) * 0.2) },
        ],
    };
}

function pieces(body) {
    const last = JSON.stringify(body.messages?.at(-1)?.content ?? body.prompt ?? "");
    if (last.includes("<")) return ["<img src=x onerror=alert(1)>", " <b>bold</b>"];
    return WORDS.slice(0, body.max_tokens ?? 256).map((word, i) => (i === 0 ? word : ` ${word}`));
}

function deltas(body, isChat) {
    const list = [];
    if (isChat && body.tools !== undefined && body.messages.at(-1).role === "user") {
        list.push({
            delta: {
                tool_calls: [
                    {
                        index: 0,
                        id: "call_1",
                        type: "function",
                        function: { name: body.tools[0].function.name, arguments: "" },
                    },
                ],
            },
        });
        for (const part of ['{"city"', ': "Ber', 'lin"}'])
            list.push({ delta: { tool_calls: [{ index: 0, function: { arguments: part } }] } });
        return { list, finish: "tool_calls" };
    }
    if (isChat)
        for (const word of ["The question", " is about", " routing."])
            list.push({ delta: { reasoning_content: word } });
    pieces(body).forEach((text, i) => {
        const logprobs = body.logprobs
            ? isChat
                ? { content: [entry(text, i)] }
                : {
                      tokens: [text],
                      token_logprobs: [entry(text, i).logprob],
                      top_logprobs: [{ [text]: entry(text, i).logprob }],
                  }
            : null;
        list.push(isChat ? { delta: { content: text }, logprobs } : { text, logprobs });
    });
    return { list, finish: "stop" };
}

export async function generate(body, isChat, reply, id) {
    const { list, finish } = deltas(body, isChat);
    const usage = { prompt_tokens: 57, completion_tokens: list.length, prompt_tokens_details: { cached_tokens: 48 } };
    if (body.stream !== true) {
        const text = list.map((one) => one.delta?.content ?? one.text ?? "").join("");
        const choice = isChat ? { message: { role: "assistant", content: text } } : { text };
        reply.writeHead(200, { "Content-Type": "application/json" });
        reply.end(JSON.stringify({ id, choices: [{ index: 0, ...choice, finish_reason: finish }], usage }));
        return;
    }
    reply.writeHead(200, { "Content-Type": "text/event-stream" });
    for (const [i, one] of list.entries()) {
        await new Promise((resolve) => setTimeout(resolve, i === 0 ? 60 : i % 13 === 0 ? 4 * GAP_MS : GAP_MS));
        if (reply.destroyed) return;
        reply.write(`data: ${JSON.stringify({ id, choices: [{ index: 0, ...one, finish_reason: null }] })}\n\n`);
    }
    reply.write(
        `data: ${JSON.stringify({ id, choices: [{ index: 0, [isChat ? "delta" : "text"]: isChat ? {} : "", finish_reason: finish }] })}\n\n`,
    );
    reply.write(`data: ${JSON.stringify({ id, choices: [], usage })}\n\n`);
    reply.end("data: [DONE]\n\n");
}

export function embed(body) {
    const vector = (text) =>
        Array.from({ length: 64 }, (_, i) => Math.sin((text.charCodeAt(i % text.length) ?? 1) * (i + 1)));
    return {
        data: body.input.map((text, index) => ({ index, embedding: vector(text) })),
        usage: { prompt_tokens: 12 },
    };
}

export function rerank(body) {
    const results = body.documents.map((text, index) => ({
        index,
        relevance_score: 1 / (1 + Math.abs(text.length - body.query.length)),
    }));
    return { results: results.sort((a, b) => b.relevance_score - a.relevance_score) };
}

export function draw() {
    return { data: [{ b64_json: PICTURE }] };
}
