// Invents logs that grow.
const started = Date.now();

export function logText(name, options) {
    const bad = options.hostile ? ["<script>alert(3)</script> in a line"] : [];
    const lines = [
        `${name}: loading weights`,
        ...bad,
        "request 5f2a: aborted after 12 tokens",
        "the KV cache is nearly full",
        "the engine refused a request",
        "in service",
    ];
    const levels = ["INFO", ...bad.map(() => "WARNING"), "INFO", "WARNING", "ERROR", "INFO"];
    const n = 800 + Math.floor((Date.now() - started) / 700);
    return Array.from({ length: n }, (_, i) => ({
        at_byte: i * 90,
        level: levels[i % lines.length].toLowerCase(),
        text: `2026-11-18 08:${String(Math.floor(i / 60) % 60).padStart(2, "0")}:${String(i % 60).padStart(2, "0")} ${levels[i % lines.length]} ${lines[i % lines.length]} (${i})`,
    }));
}

export function log(name, query, options) {
    const order = ["debug", "info", "warning", "error"];
    const least = order.indexOf(query.get("level") ?? "");
    const text = (query.get("text") ?? "").toLowerCase();
    const limit = Number(query.get("limit") ?? 500);
    const all = logText(name, options);
    const end = all.length * 90;
    const fits = (line) => order.indexOf(line.level) >= least && line.text.toLowerCase().includes(text);
    if (query.has("after"))
        return {
            lines: all.filter((line) => line.at_byte >= Number(query.get("after")) && fits(line)).slice(0, limit),
            from_byte: Number(query.get("after")),
            to_byte: end,
        };
    const before = Number(query.get("before") ?? end);
    const lines = all.filter((line) => line.at_byte < before && fits(line)).slice(-limit);
    return { lines, from_byte: lines.length < limit ? 0 : lines[0].at_byte, to_byte: end };
}
