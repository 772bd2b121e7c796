// Draws the deployment: who sends what to whom, and how each part does.
import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { count, percent, plural } from "../../format";
import { link } from "../../route";
import type { Overview } from "../../types";
import { tone } from "../../ui/parts";
import { fit } from "./fit";
import { graphOf, groupSummary, type Flow, type Node } from "./graph";
import { place, SQUARE, type Box, type Label, type Path } from "./layout";

const FONT = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const BOLD = `600 ${FONT}`;

export function Topology({ now }: { now: Overview }): JSX.Element {
    const box = useRef<HTMLDivElement>(null);
    const [width, setWidth] = useState(0);
    useEffect(() => {
        const parent = box.current;
        if (parent === null) return;
        setWidth(parent.clientWidth);
        const watch = new ResizeObserver(() => setWidth(parent.clientWidth));
        watch.observe(parent);
        return () => watch.disconnect();
    }, []);
    const placed = useMemo(() => (width === 0 ? null : place(graphOf(now), width, inWords)), [now, width]);
    return (
        <div ref={box} class="topology">
            {placed === null ? null : (
                <svg
                    width={placed.width}
                    height={placed.height}
                    role="group"
                    aria-label="The parts of the deployment and what flows between them; the table of workers below has the same figures"
                >
                    <defs>
                        {(["requests", "kv", "encoded"] as const).map((kind) => (
                            <marker
                                key={kind}
                                id={`arrow-${kind}`}
                                viewBox="0 0 8 8"
                                refX="6"
                                refY="4"
                                markerWidth="7"
                                markerHeight="7"
                                markerUnits="userSpaceOnUse"
                                orient="auto"
                            >
                                <path d="M0 0 8 4 0 8Z" class={`tip ${kind}`} />
                            </marker>
                        ))}
                    </defs>
                    {placed.headings.map((heading) => (
                        <text key={heading.text} x={heading.x} y={heading.y} class="heading">
                            {fit(heading.text, heading.width, FONT)}
                        </text>
                    ))}
                    {placed.paths.map((path) => (
                        <Wire key={`${path.flow.from} ${path.flow.to} ${path.flow.kind}`} path={path} />
                    ))}
                    {placed.boxes.map((one) =>
                        one.members === null ? (
                            <NodeBox key={one.node.key} box={one} />
                        ) : (
                            <GroupBox key={one.node.key} box={one} nodes={one.members} />
                        ),
                    )}
                    {placed.labels.map((label) => (
                        <FlowLabel key={`${label.x} ${label.y}`} label={label} />
                    ))}
                </svg>
            )}
        </div>
    );
}

function inWords({ kind, requests, tokens }: Pick<Flow, "kind" | "requests" | "tokens">): string[] {
    const what = kind === "kv" ? "KV" : kind === "encoded" ? "img" : "req";
    const lines = [`${count(requests)} ${what}/s`];
    if (tokens > 0) lines.push(`${count(tokens)} tok/s`);
    return lines;
}

function Wire({ path }: { path: Path }): JSX.Element {
    const { kind, requests } = path.flow;
    const weight = requests > 0 ? 1.2 + Math.min(2.4, Math.log10(1 + requests)) : 1;
    return (
        <path
            d={path.d}
            class={`wire ${kind} ${requests > 0 ? "busy" : ""}`}
            stroke-width={weight.toFixed(1)}
            marker-end={`url(#arrow-${kind})`}
        />
    );
}

function FlowLabel({ label }: { label: Label }): JSX.Element {
    return (
        <text
            x={label.x}
            y={label.y - (label.anchor === "end" ? 5 : -3)}
            text-anchor={label.anchor}
            class={`flow ${label.kind}`}
        >
            {label.lines.map((line, i) => (
                <tspan key={line} x={label.x} dy={i === 0 ? 0 : 16}>
                    {line}
                </tspan>
            ))}
        </text>
    );
}

function NodeBox({ box }: { box: Box }): JSX.Element {
    const { node, x, y, width, height } = box;
    const inside = width - 22;
    const body = (
        <>
            <rect x={x + 0.5} y={y + 0.5} width={width - 1} height={height - 1} rx="7" class="box" />
            <rect x={x + 0.5} y={y + 8} width="3" height={height - 16} rx="1.5" class={`edge ${tone(node.state)}`} />
            <text x={x + 12} y={y + 20} class="title">
                {fit(node.title, inside, BOLD)}
            </text>
            <text x={x + 12} y={y + 36} class="small">
                {fit(firstLine(node), inside, FONT)}
            </text>
            {node.worker === null ? null : <WorkerLines box={box} inside={inside} />}
            <title>{wholeText(node)}</title>
        </>
    );
    if (node.worker === null) return <g>{body}</g>;
    return (
        <a href={link("", "", { worker: node.worker })} class="node">
            {body}
        </a>
    );
}

function firstLine(node: Node): string {
    const load = node.inFlight === null ? "" : ` · ${count(node.inFlight)} in flight`;
    return `${node.state}${load}`;
}

function WorkerLines({ box, inside }: { box: Box; inside: number }): JSX.Element {
    const { node, x, y } = box;
    const cache = [
        node.kv === null ? "" : `KV ${percent(node.kv)}`,
        node.hit === null ? "" : `hit ${percent(node.hit)}`,
    ]
        .filter((text) => text !== "")
        .join(" · ");
    const extra = [
        node.tiers > 0 ? plural(node.tiers, "tier") : "",
        node.adapters > 0 ? plural(node.adapters, "adapter") : "",
    ]
        .filter((text) => text !== "")
        .join(" · ");
    const lines = [cache, extra, node.version].filter((text) => text !== "");
    return (
        <>
            <text x={x + 12} y={y + 52} class="small strong">
                {fit(node.model, inside, FONT)}
            </text>
            {lines.map((line, i) => (
                <text key={line} x={x + 12} y={y + 67 + i * 14.5} class={i === 0 ? "small" : "tiny"}>
                    {fit(line, inside, FONT)}
                </text>
            ))}
            {node.kv === null ? null : (
                <>
                    <rect x={x + 12} y={y + box.height - 4} width={inside} height="2" class="track" />
                    <rect
                        x={x + 12}
                        y={y + box.height - 4}
                        width={Math.max(0, inside * Math.min(1, node.kv))}
                        height="2"
                        class="level"
                    />
                </>
            )}
        </>
    );
}

function GroupBox({ box, nodes }: { box: Box; nodes: readonly Node[] }): JSX.Element {
    const { x, y, width, height, perRow } = box;
    const all = groupSummary(nodes);
    return (
        <g>
            <rect x={x + 0.5} y={y + 0.5} width={width - 1} height={height - 1} rx="7" class="box" />
            <text x={x + 10} y={y + 20} class="title">
                {plural(nodes.length, "worker")}
            </text>
            <text x={x + 10} y={y + 36} class="small">
                {fit(`${all.ready} ready · ${count(all.inFlight)} in flight`, width - 20, FONT)}
            </text>
            {all.kv === null ? null : (
                <text x={x + 10} y={y + 51} class="small">
                    {fit(`KV ${percent(all.kv)} on average`, width - 20, FONT)}
                </text>
            )}
            {nodes.map((node, i) => (
                <Square
                    key={node.key}
                    node={node}
                    x={x + 10 + (i % perRow) * (SQUARE + 3)}
                    y={y + 62 + Math.floor(i / perRow) * (SQUARE + 3)}
                />
            ))}
        </g>
    );
}

/** One of many workers: the more of its KV cache is used, the higher it is filled. */
function Square({ node, x, y }: { node: Node; x: number; y: number }): JSX.Element {
    const filled = (node.kv ?? 0) * SQUARE;
    const shape = (
        <>
            <rect x={x} y={y} width={SQUARE} height={SQUARE} rx="2" class={`square ${tone(node.state)}`} />
            <rect
                x={x}
                y={y + SQUARE - filled}
                width={SQUARE}
                height={filled}
                rx="2"
                class={`filled ${tone(node.state)}`}
            />
            <title>{wholeText(node)}</title>
        </>
    );
    if (node.worker === null) return <g>{shape}</g>;
    return (
        <a href={link("", "", { worker: node.worker })} aria-label={wholeText(node)} class="node">
            {shape}
        </a>
    );
}

function wholeText(node: Node): string {
    const parts = [
        node.title,
        node.role,
        firstLine(node),
        node.model,
        node.kv === null ? "" : `KV cache ${percent(node.kv)} used`,
        node.hit === null ? "" : `hit rate ${percent(node.hit)}`,
    ];
    return parts.filter((part) => part !== "").join(", ");
}
