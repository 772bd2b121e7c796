// Draws rows of prefixes against workers on a canvas; only the rows in view, so that thousands cost nothing.
import type { JSX } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { duration, plural, whole } from "../../format";
import { workerName } from "../../live";
import { useStore } from "../../state";
import { colour, colours } from "../../theme";
import { placesOf } from "./node_table";
import type { Row, TierChoice } from "./rows";

const ROW = 18;
const HEAD = 24;
const MOST_HEIGHT = 520;
const TIERS = ["device", "host", "disk"] as const;

interface Cell {
    row: number;
    column: number;
}

interface HeatMapProps {
    rows: readonly Row[];
    workers: readonly string[];
    tier: TierChoice;
}

export function HeatMap({ rows, workers, tier }: HeatMapProps): JSX.Element {
    const box = useRef<HTMLDivElement>(null);
    const canvas = useRef<HTMLCanvasElement>(null);
    const [top, setTop] = useState(0);
    const [width, setWidth] = useState(0);
    const [cell, setCell] = useState<Cell>({ row: 0, column: 0 });
    const version = useStore(colours);
    const height = Math.min(MOST_HEIGHT, HEAD + rows.length * ROW);
    const label = Math.min(250, Math.max(96, width * 0.28));
    const step = workers.length === 0 ? 0 : Math.min(170, (width - label) / workers.length);

    useEffect(() => {
        const parent = box.current;
        if (parent === null) return;
        const watch = new ResizeObserver(() => setWidth(parent.clientWidth));
        watch.observe(parent);
        return () => watch.disconnect();
    }, []);
    useEffect(() => {
        const frame = requestAnimationFrame(() => {
            if (canvas.current !== null && width > 0)
                draw(canvas.current, { rows, workers, tier, top, width, height, label, step, cell });
        });
        return () => cancelAnimationFrame(frame);
    }, [rows, workers, tier, top, width, height, label, step, cell, version]);

    const pick = (event: MouseEvent): void => {
        const place = canvas.current?.getBoundingClientRect();
        if (place === undefined) return;
        const row = Math.floor((event.clientY - place.top - HEAD + top) / ROW);
        const column = Math.floor((event.clientX - place.left - label) / step);
        if (row >= 0 && row < rows.length) setCell({ row, column: Math.max(0, Math.min(workers.length - 1, column)) });
    };
    const move = (event: KeyboardEvent): void => {
        const by = {
            ArrowDown: [1, 0],
            ArrowUp: [-1, 0],
            ArrowRight: [0, 1],
            ArrowLeft: [0, -1],
            PageDown: [20, 0],
            PageUp: [-20, 0],
            Home: [-rows.length, 0],
            End: [rows.length, 0],
        }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        const next = {
            row: clamp(cell.row + by[0]!, rows.length),
            column: clamp(cell.column + by[1]!, workers.length),
        };
        setCell(next);
        const y = next.row * ROW;
        if (box.current !== null && (y < top || y > top + height - HEAD - ROW))
            box.current.scrollTop = Math.max(0, y - height / 2);
    };
    return (
        <>
            <div
                ref={box}
                class="heat"
                style={{ height: `${height}px` }}
                tabIndex={0}
                role="application"
                aria-label="Heat map of prefixes and workers; arrow keys move, the line below says what is there"
                aria-describedby="heat-cell"
                onScroll={(event) => setTop(event.currentTarget.scrollTop)}
                onKeyDown={move}
                onMouseMove={pick}
            >
                <div style={{ height: `${HEAD + rows.length * ROW}px` }}>
                    <canvas ref={canvas} aria-hidden="true" />
                </div>
            </div>
            <p id="heat-cell" class="readout" role="status">
                {describe(rows[cell.row], workers[cell.column])}
            </p>
        </>
    );
}

function clamp(value: number, size: number): number {
    return Math.max(0, Math.min(size - 1, value));
}

function describe(row: Row | undefined, worker: string | undefined): string {
    if (row === undefined) return "";
    const { node } = row;
    const held = worker === undefined ? undefined : node.workers[worker];
    const here =
        held === undefined
            ? "has nothing of it"
            : TIERS.filter((tier) => (held[tier] ?? 0) > 0)
                  .map((tier) => `${held[tier]} on ${tier}`)
                  .join(", ");
    const used = `${plural(node.used, "request")} began with it${node.last_used_seconds === null ? "" : `, the last ${duration(node.last_used_seconds)} ago`}`;
    const elsewhere = worker === undefined ? placesOf(row) : `${workerName(worker)}: ${here}`;
    return `Run ${node.id}: ${plural(node.blocks, "block")} after ${whole(node.depth)}; ${used}. ${elsewhere}.`;
}

interface Picture extends HeatMapProps {
    top: number;
    width: number;
    height: number;
    label: number;
    step: number;
    cell: Cell;
}

function draw(canvas: HTMLCanvasElement, picture: Picture): void {
    const { rows, top, width, height, cell, label, step } = picture;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d");
    if (pen === null) return;
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const ink = {
        text: colour("text"),
        faint: colour("faint"),
        line: colour("grid"),
        empty: colour("sunken"),
        accent: colour("accent"),
        tiers: { device: colour("device"), host: colour("host"), disk: colour("disk") },
    };
    const first = Math.max(0, Math.floor(top / ROW));
    const last = Math.min(rows.length, first + Math.ceil(height / ROW) + 1);
    for (let i = first; i < last; i += 1) drawRow(pen, picture, rows[i]!, HEAD + i * ROW - top, ink);
    pen.strokeStyle = ink.accent;
    pen.lineWidth = 1.5;
    pen.strokeRect(label + cell.column * step, HEAD + cell.row * ROW - top + 0.5, Math.max(3, step - 1), ROW - 2);
    pen.fillStyle = colour("card");
    pen.fillRect(0, 0, width, HEAD - 2);
    drawHead(pen, picture, ink.faint);
}

interface Ink {
    text: string;
    faint: string;
    line: string;
    empty: string;
    tiers: Record<(typeof TIERS)[number], string>;
}

function drawRow(pen: CanvasRenderingContext2D, picture: Picture, row: Row, y: number, ink: Ink): void {
    const { label, step, workers, tier } = picture;
    const indent = Math.min(row.level * 10, label * 0.4);
    pen.fillStyle = ink.text;
    const size = label > 130 ? plural(row.node.blocks, "block") : whole(row.node.blocks);
    pen.fillText(size, indent + 4, y + ROW / 2);
    pen.fillStyle = ink.faint;
    pen.textAlign = "right";
    pen.fillText(`${whole(row.node.used)} ×`, label - 8, y + ROW / 2);
    pen.textAlign = "left";
    pen.fillStyle = ink.line;
    for (let level = 1; level <= row.level && level * 10 <= label * 0.4; level += 1)
        pen.fillRect(level * 10 - 4, y, 1, ROW);
    const inside = step > 6 ? step - 2 : step;
    workers.forEach((id, i) => {
        const x = label + i * step;
        const held = row.node.workers[id];
        pen.fillStyle = ink.empty;
        pen.fillRect(x, y + 1, inside, ROW - 3);
        if (held === undefined) return;
        // A block may lie in several tiers at once: each has a line of its own in the cell.
        const shown = TIERS.filter((one) => (tier === "all" || tier === one) && (held[one] ?? 0) > 0);
        const line = (ROW - 3) / shown.length;
        shown.forEach((one, n) => {
            const share = Math.min(1, held[one]! / Math.max(1, row.node.blocks));
            pen.fillStyle = ink.tiers[one];
            pen.fillRect(x, y + 1 + n * line, Math.max(1, share * inside), line);
        });
    });
}

function drawHead(pen: CanvasRenderingContext2D, { workers, label, step }: Picture, faint: string): void {
    pen.fillStyle = faint;
    pen.fillText(label > 130 ? "blocks" : "bl.", 4, HEAD / 2 - 2);
    pen.textAlign = "right";
    pen.fillText(label > 130 ? "requests" : "req.", label - 8, HEAD / 2 - 2);
    pen.textAlign = "left";
    const every = Math.max(1, Math.ceil(64 / Math.max(1, step)));
    workers.forEach((id, i) => {
        if (i % every === 0)
            pen.fillText(short(workerName(id), (every * step - 6) / 6.2), label + i * step, HEAD / 2 - 2);
    });
}

function short(text: string, most: number): string {
    return text.length <= most ? text : `${text.slice(0, Math.max(1, Math.floor(most) - 1))}…`;
}
