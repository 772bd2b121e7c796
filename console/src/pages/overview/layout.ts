// Places the nodes of a graph: in columns on a wide screen, in rows on a narrow one. Edges never cross a box.
import type { Flow, Graph, Layer, Node } from "./graph";

export interface Box {
    x: number;
    y: number;
    width: number;
    height: number;
    node: Node;
    /** The nodes of a group, and how many squares stand in a row. */
    members: Node[] | null;
    perRow: number;
}

export interface Path {
    d: string;
    flow: Flow;
}

export interface Label {
    x: number;
    y: number;
    anchor: "start" | "middle" | "end";
    lines: string[];
    kind: Flow["kind"];
}

export interface Heading {
    x: number;
    width: number;
    y: number;
    text: string;
}

export interface Placed {
    width: number;
    height: number;
    boxes: Box[];
    paths: Path[];
    labels: Label[];
    headings: Heading[];
}

type Write = (flow: { kind: Flow["kind"]; requests: number; tokens: number }) => string[];

export const SQUARE = 14;
const NODE_HEIGHT = { small: 56, large: 106 };
const ROW_GAP = 18;
const GROUP_HEAD = 62;
/** A column narrower than this cannot show a worker, and a gap not what flows. */
const LEAST = { node: 118, gap: 84 };

export function place(graph: Graph, width: number, write: Write): Placed {
    const n = graph.layers.length;
    return width < n * LEAST.node + (n - 1) * LEAST.gap ? inRows(graph, width, write) : inColumns(graph, width, write);
}

function heightOf(node: Node): number {
    return node.worker === null ? NODE_HEIGHT.small : NODE_HEIGHT.large;
}

function groupBox(layer: Layer, x: number, y: number, width: number): Box {
    const perRow = Math.max(1, Math.floor((width - 20) / (SQUARE + 3)));
    const rows = Math.ceil(layer.nodes.length / perRow);
    return {
        x,
        y,
        width,
        height: GROUP_HEAD + rows * (SQUARE + 3) + 8,
        node: layer.nodes[0]!,
        members: layer.nodes,
        perRow,
    };
}

function inColumns({ layers, flows }: Graph, width: number, write: Write): Placed {
    const n = layers.length;
    const gap = n > 1 ? Math.max(LEAST.gap, Math.min(130, (width - n * 175) / (n - 1))) : 0;
    const nodeWidth = Math.min(230, (width - (n - 1) * gap) / n);
    const step = n > 1 ? (width - nodeWidth) / (n - 1) : 0;
    const column = new Map<string, number>();
    layers.forEach((layer, i) => layer.nodes.forEach((node) => column.set(node.key, i)));
    const skips = flows.filter((flow) => Math.abs((column.get(flow.to) ?? 0) - (column.get(flow.from) ?? 0)) > 1);
    const top = 26 + (skips.length > 0 ? 20 : 0);
    const heights = layers.map((layer) =>
        layer.isGroup ? groupBox(layer, 0, 0, nodeWidth).height : stack(layer.nodes),
    );
    const tallest = Math.max(...heights, 60);
    const boxes: Box[] = [];
    layers.forEach((layer, i) => {
        const x = i * step;
        let y = top + (tallest - heights[i]!) / 2;
        if (layer.isGroup) boxes.push(groupBox(layer, x, y, nodeWidth));
        else {
            for (const node of layer.nodes) {
                boxes.push({ x, y, width: nodeWidth, height: heightOf(node), node, members: null, perRow: 0 });
                y += heightOf(node) + ROW_GAP;
            }
        }
    });
    const at = new Map(boxes.map((box) => [box.node.key, box]));
    const paths = flows.flatMap((flow) => columnPath(flow, at, column, top - 14, step - nodeWidth));
    const labels = inbound(flows).flatMap((group) => columnLabel(group, at, gap, write));
    const headings = layers.map((layer, i) => ({ x: i * step, y: 12, width: nodeWidth, text: layer.name }));
    return { width, height: top + tallest + 10, boxes, paths, labels, headings };
}

function stack(nodes: readonly Node[]): number {
    return nodes.reduce((height, node) => height + heightOf(node) + ROW_GAP, -ROW_GAP);
}

/** Wires go along and across only: down beside the column that they come from, where no label stands, then straight. */
function columnPath(flow: Flow, at: Map<string, Box>, column: Map<string, number>, lane: number, gap: number): Path[] {
    const from = at.get(flow.from);
    const to = at.get(flow.to);
    if (from === undefined || to === undefined) return [];
    const span = (column.get(flow.to) ?? 0) - (column.get(flow.from) ?? 0);
    const x1 = from.x + from.width;
    const y1 = from.y + port(from, flow.kind);
    const x2 = to.x - 2;
    const y2 = to.y + port(to, flow.kind);
    const shift = flow.kind === "requests" ? 12 : flow.kind === "kv" ? 20 : 16;
    if (span === 1) return [{ d: `M${x1} ${y1}${across(x1 + shift, y1, y2)}H${x2}`, flow }];
    if (span <= 0) {
        // Two workers of one layer, such as a move of KV: a bow at the right side.
        return [{ d: `M${x1} ${y1}C${x1 + 30} ${y1} ${x1 + 30} ${y2} ${x1} ${y2}`, flow }];
    }
    return [{ d: `M${x1} ${y1}${across(x1 + shift, y1, lane)}${across(to.x - gap + shift, lane, y2)}H${x2}`, flow }];
}

/** Goes to `x`, there from one height to another, with round corners, and a little on. */
function across(x: number, y1: number, y2: number): string {
    const r = Math.min(6, Math.abs(y2 - y1) / 2);
    const way = Math.sign(y2 - y1) * r;
    return `H${x - r}Q${x} ${y1} ${x} ${y1 + way}V${y2 - way}Q${x} ${y2} ${x + r} ${y2}`;
}

function port(box: Box, kind: Flow["kind"]): number {
    const share = kind === "requests" ? 0.26 : kind === "kv" ? 0.8 : 0.56;
    return box.node.worker === null && box.members === null ? box.height / 2 : Math.min(box.height, 106) * share;
}

interface Group {
    to: string;
    kind: Flow["kind"];
    requests: number;
    tokens: number;
}

/** Adds up what reaches a node, by kind: one label each, so that labels cannot collide. */
function inbound(flows: readonly Flow[]): Group[] {
    const groups = new Map<string, Group>();
    for (const { to, kind, requests, tokens } of flows) {
        const group = groups.get(`${to}\n${kind}`) ?? { to, kind, requests: 0, tokens: 0 };
        group.requests += requests;
        group.tokens += tokens;
        groups.set(`${to}\n${kind}`, group);
    }
    return [...groups.values()];
}

function columnLabel(group: Group, at: Map<string, Box>, gap: number, write: Write): Label[] {
    const box = at.get(group.to);
    if (box === undefined) return [];
    const y = box.y + port(box, group.kind);
    return [{ x: box.x - Math.min(14, gap / 6), y, anchor: "end", lines: write(group), kind: group.kind }];
}

/** Layers from top to bottom; before each one stands what reaches it, from which layer. */
function inRows({ layers, flows }: Graph, width: number, write: Write): Placed {
    const layerOf = new Map<string, number>();
    layers.forEach((layer, i) => layer.nodes.forEach((node) => layerOf.set(node.key, i)));
    const boxes: Box[] = [];
    const paths: Path[] = [];
    const labels: Label[] = [];
    const headings: Heading[] = [];
    let y = 0;
    layers.forEach((layer, i) => {
        const reaching = between(flows, layerOf, i);
        if (i > 0) {
            const room = Math.max(30, reaching.length * 15 + 14);
            reaching.forEach((group, k) => {
                const text = `${layers[group.from]?.name ?? ""}: ${write(group).join(", ")}`;
                labels.push({ x: 24, y: y + 15 + k * 15, anchor: "start", lines: [text], kind: group.kind });
            });
            const first = flows.find((flow) => layerOf.get(flow.to) === i);
            if (first !== undefined) paths.push({ d: `M10 ${y + 2}V${y + room - 4}`, flow: first });
            y += room;
        }
        headings.push({ x: 0, y: y + 12, width, text: layer.name });
        y += 20;
        y = rowBoxes(layer, boxes, y, width);
    });
    return { width, height: y, boxes, paths, labels, headings };
}

function rowBoxes(layer: Layer, boxes: Box[], top: number, width: number): number {
    if (layer.isGroup) {
        const box = groupBox(layer, 0, top, width - 1);
        boxes.push(box);
        return top + box.height + 4;
    }
    const perRow = Math.max(1, Math.min(layer.nodes.length, Math.floor((width + 10) / 150)));
    const nodeWidth = Math.min(260, (width - (perRow - 1) * 10) / perRow - 1);
    let y = top;
    layer.nodes.forEach((node, k) => {
        if (k > 0 && k % perRow === 0) y += heightOf(node) + 10;
        boxes.push({
            x: (k % perRow) * (nodeWidth + 10),
            y,
            width: nodeWidth,
            height: heightOf(node),
            node,
            members: null,
            perRow: 0,
        });
    });
    return y + heightOf(layer.nodes[0]!) + 4;
}

interface Between {
    from: number;
    kind: Flow["kind"];
    requests: number;
    tokens: number;
}

function between(flows: readonly Flow[], layerOf: Map<string, number>, to: number): Between[] {
    const groups = new Map<string, Between>();
    for (const flow of flows) {
        if (layerOf.get(flow.to) !== to) continue;
        const from = layerOf.get(flow.from) ?? 0;
        const group = groups.get(`${from} ${flow.kind}`) ?? { from, kind: flow.kind, requests: 0, tokens: 0 };
        group.requests += flow.requests;
        group.tokens += flow.tokens;
        groups.set(`${from} ${flow.kind}`, group);
    }
    return [...groups.values()];
}
