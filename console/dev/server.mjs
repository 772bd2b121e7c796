// Stands in for the console's server in development and tests: the same routes, invented figures.
//
//   node dev/server.mjs [PORT]     then http://127.0.0.1:PORT/?scale=100&hostile=1&rate=1000&login=1&read_only=1&calm=1
//
// The page's address sets what is served, until it is loaded with another one.
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { draw, embed, generate, rerank } from "./answers.mjs";
import { makeBench } from "./bench.mjs";
import { historyOf, modelsOf, overviewOf, sampleOf } from "./deployment.mjs";
import { makeGateway } from "./gateway.mjs";
import { log, logText } from "./logs.mjs";
import { cachesOf, detailOf, requestOf } from "./requests.mjs";

const assets = join(dirname(fileURLToPath(import.meta.url)), "..", "..", "src", "dynamo_vllm", "console", "assets");
const TYPES = {
    html: "text/html; charset=utf-8",
    js: "text/javascript; charset=utf-8",
    css: "text/css; charset=utf-8",
    txt: "text/plain; charset=utf-8",
};
const HEADERS = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
};
const VERBS = [
    "load_lora",
    "unload_lora",
    "sleep",
    "wake_up",
    "pause",
    "resume",
    "clear_kv_blocks",
    "reset_caches",
    "restart",
    "drain",
    "scale",
    "prove_tiers",
    "keys_list",
    "keys_create",
    "keys_revoke",
    "keys_limits",
    "usage",
];

let options = { scale: 0, hostile: false, rate: 4, login: false, read_only: false, calm: false };
let isIn = false;
let number = 1000;
let gateway = makeGateway(options);
const started = Date.now();
const listeners = new Set();
const rows = Array.from({ length: 300 }, (_, i) => requestOf(options, 999 - i, started / 1000 - i * 0.4));

function choose(query) {
    const flag = (name) => query.get(name) === "1";
    options = {
        scale: Number(query.get("scale") ?? 0),
        hostile: flag("hostile"),
        rate: Number(query.get("rate") ?? 4),
        login: flag("login"),
        read_only: flag("read_only"),
        calm: flag("calm"),
    };
    isIn = false;
    gateway = makeGateway(options);
    rows.splice(
        0,
        rows.length,
        ...Array.from({ length: 300 }, (_, i) => requestOf(options, 999 - i, Date.now() / 1000 - i * 0.4)),
    );
}

function publish(name, value) {
    for (const reply of listeners)
        if (reply.writableLength < 1e6) reply.write(`event: ${name}\ndata: ${JSON.stringify(value)}\n\n`);
}

const bench = makeBench(publish);

function json(reply, value, status = 200) {
    reply.writeHead(status, { "Content-Type": "application/json", "Cache-Control": "no-store" });
    reply.end(JSON.stringify(value));
}

function refuse(reply, status, message, fix = null) {
    json(reply, { error: { message, fix } }, status);
}

function act(verb, asked) {
    const done = (worker, said, reply = {}, ok = true) => ({ worker, ok, said, reply });
    if (verb in gateway) return [done(null, ...gateway[verb](asked.body))];
    if (verb === "drain") {
        options.drained = [...(options.drained ?? []), asked.worker];
        return [done(asked.worker, "drained and stopped after 0.9 s")];
    }
    if (verb === "restart" || verb === "scale")
        return [
            done(
                asked.worker ?? asked.group,
                verb === "restart" ? "ready again after 4.1 s" : `${asked.body.workers} workers now`,
            ),
        ];
    const workers = overviewOf(options).workers.filter((worker) => asked.worker === null || worker.id === asked.worker);
    return workers.map((worker, i) =>
        i === 1
            ? done(worker.id, "refused (409 wrong_state): this worker is paused", {}, false)
            : done(worker.id, `${verb}: done after 1.3 s`),
    );
}

const ROUTES = {
    "/api/settings": () => ({
        version: "0.28.0",
        read_only: options.read_only,
        needs_login: options.login,
        logged_in: isIn,
        url: "http://127.0.0.1:8000",
        namespace: "dynamo",
        run_folder: true,
        models: options.login && !isIn ? [] : modelsOf(options),
        grafana: null,
        actions: options.read_only ? [] : VERBS,
        prompt_text: false,
    }),
    "/api/overview": () => overviewOf(options),
    "/api/history": (query) => historyOf(options, Number(query.get("seconds") ?? 3600)),
    "/api/caches": () => cachesOf(options),
    "/api/bench": () => bench.state(),
    "/api/logs": () => ({
        logs: ["frontend", "gateway", "worker-1", "worker-2"].map((name) => ({
            name,
            bytes: logText(name, options).length * 90,
            changed: Date.now() / 1000 - 1,
        })),
    }),
    "/api/requests": (query) => {
        const fits = (row) =>
            (!query.get("worker") ||
                row.worker === query.get("worker") ||
                row.prefill_worker === query.get("worker")) &&
            (!query.get("model") || row.model === query.get("model") || row.adapter === query.get("model"));
        const from = query.get("before") ? rows.findIndex((row) => row.id === query.get("before")) + 1 : 0;
        return {
            requests: rows
                .slice(from)
                .filter(fits)
                .slice(0, Number(query.get("limit") ?? 100)),
            dropped: 1203,
        };
    },
};

async function answer(request, reply, url) {
    const path = url.pathname;
    if (path === "/live") return json(reply, {});
    if (path === "/" || path.startsWith("/assets/")) {
        if (path === "/") choose(url.searchParams);
        const name = path === "/" ? "index.html" : path.slice("/assets/".length);
        if (!/^[a-z]+\.(html|js|css|txt)$/.test(name)) return refuse(reply, 404, "There is no such file.");
        reply.writeHead(200, { "Content-Type": TYPES[name.split(".")[1]] });
        return reply.end(await readFile(join(assets, name)));
    }
    if (options.login && !isIn && path !== "/api/settings" && path !== "/api/login")
        return refuse(reply, 401, "Log in first.");
    if (request.method === "POST") return posted(request, reply, path);
    if (path === "/api/live") return live(reply);
    if (path.startsWith("/api/requests/")) {
        const row = rows.find((one) => one.id === decodeURIComponent(path.slice("/api/requests/".length)));
        return row === undefined
            ? refuse(reply, 404, "This request is not known here.", "Only the last ones are kept.")
            : json(reply, detailOf(options, row));
    }
    if (path.startsWith("/api/logs/"))
        return json(reply, log(decodeURIComponent(path.slice("/api/logs/".length)), url.searchParams, options));
    const route = ROUTES[path];
    return route === undefined ? refuse(reply, 404, "There is no such route.") : json(reply, route(url.searchParams));
}

async function posted(request, reply, path) {
    if (request.headers["x-console"] !== "1" || request.headers.origin !== `http://${request.headers.host}`)
        return refuse(reply, 403, "This request does not come from the console's page.");
    const chunks = [];
    for await (const chunk of request) chunks.push(chunk);
    if (path === "/v1/audio/transcriptions")
        return json(reply, { text: `A recording of ${Buffer.concat(chunks).length} bytes.` });
    const body = JSON.parse(Buffer.concat(chunks).toString() || "{}");
    if (path === "/api/login") {
        isIn = body.token === "secret";
        return isIn ? json(reply, {}) : refuse(reply, 401, "This is not the admin token.");
    }
    if (path === "/api/logout") {
        isIn = false;
        return json(reply, {});
    }
    if (path.startsWith("/api/actions/") || path.startsWith("/api/bench")) {
        if (options.read_only) return refuse(reply, 403, "This console is read only.");
        if (path === "/api/bench") {
            bench.start(body);
            return json(reply, { id: bench.state().id });
        }
        if (path === "/api/bench/stop") {
            bench.stop();
            return json(reply, {});
        }
        const verb = path.slice("/api/actions/".length);
        const results = act(verb, body);
        const told = results.map(({ reply: _, ...result }) => result);
        publish("action", { at: Date.now() / 1000, verb, results: told });
        return json(reply, { results });
    }
    const id = `chatcmpl-${rows[0].id}`;
    if (path === "/v1/chat/completions") return generate(body, true, reply, id);
    if (path === "/v1/completions") return generate(body, false, reply, id.replace("chat", ""));
    const plain = { "/v1/embeddings": embed, "/v1/rerank": rerank, "/v1/images/generations": draw }[path];
    return plain === undefined ? refuse(reply, 404, "There is no such route.") : json(reply, plain(body));
}

function live(reply) {
    reply.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-store" });
    reply.write(`event: overview\ndata: ${JSON.stringify(overviewOf(options))}\n\n`);
    listeners.add(reply);
    reply.on("close", () => listeners.delete(reply));
}

setInterval(() => {
    publish("overview", overviewOf(options));
    publish("sample", sampleOf(options, Date.now() / 1000));
}, 2000);
setInterval(() => {
    const n = options.rate / 20;
    const whole = Math.floor(n) + (Math.random() < n % 1 ? 1 : 0);
    for (let i = 0; i < whole; i += 1) {
        const row = requestOf(options, (number += 1), Date.now() / 1000);
        rows.unshift(row);
        publish("request", row);
    }
    rows.length = Math.min(rows.length, 2000);
}, 50);

const server = createServer((request, reply) => {
    for (const [name, value] of Object.entries(HEADERS)) reply.setHeader(name, value);
    answer(request, reply, new URL(request.url, "http://x")).catch((error) => refuse(reply, 500, String(error)));
});
server.listen(Number(process.argv[2] ?? 8001), "127.0.0.1", () =>
    console.log(`http://127.0.0.1:${server.address().port}/`),
);
