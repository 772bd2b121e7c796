// Draws lines over time on a canvas with uPlot, and says in words what they show.
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { colour, colours, LINES } from "../theme";
import { useStore } from "../state";
import type { Numbers } from "../types";
import { Empty } from "./parts";

export interface Line {
    name: string;
    values: Numbers;
}

interface ChartProps {
    label: string;
    at: readonly number[];
    lines: readonly Line[];
    write: (value: number | null | undefined) => string;
    height?: number;
    /** Times, or plain numbers such as seconds since a start. */
    isTime?: boolean;
    most?: number;
}

const FONT = "11px system-ui, sans-serif";

export function Chart(props: ChartProps): JSX.Element {
    return props.lines.length === 0 ? <Empty>No figures yet.</Empty> : <Plot {...props} />;
}

function Plot({ label, at, lines, write, height = 170, isTime = true, most }: ChartProps): JSX.Element {
    const box = useRef<HTMLDivElement>(null);
    const plot = useRef<uPlot | null>(null);
    const version = useStore(colours);
    const names = lines.map((line) => line.name).join("\n");

    useEffect(() => {
        const parent = box.current;
        if (parent === null) return;
        const made = new uPlot(
            options(parent.clientWidth, height, names.split("\n"), write, isTime, most),
            data(at, lines),
            parent,
        );
        plot.current = made;
        const watch = new ResizeObserver(() => {
            if (parent.clientWidth !== made.width) made.setSize({ width: parent.clientWidth, height });
        });
        watch.observe(parent);
        return () => {
            watch.disconnect();
            made.destroy();
            plot.current = null;
        };
    }, [names, height, version, isTime, most]);

    useEffect(() => plot.current?.setData(data(at, lines)), [at, lines]);
    return (
        <figure class="chart" aria-label={`${label}: ${inWords(lines, write)}`} role="img">
            <div ref={box} />
        </figure>
    );
}

function data(at: readonly number[], lines: readonly Line[]): uPlot.AlignedData {
    return [[...at], ...lines.map((line) => line.values)];
}

function inWords(lines: readonly Line[], write: ChartProps["write"]): string {
    return lines.map((line) => `${line.name} ${write(last(line.values))}`).join(", ");
}

function last(values: Numbers): number | null {
    for (let i = values.length - 1; i >= 0; i -= 1) {
        const value = values[i];
        if (value !== null && value !== undefined) return value;
    }
    return null;
}

function options(
    width: number,
    height: number,
    names: string[],
    write: ChartProps["write"],
    isTime: boolean,
    most?: number,
): uPlot.Options {
    const axis = {
        stroke: colour("faint"),
        font: FONT,
        grid: { stroke: colour("grid"), width: 1 },
        ticks: { show: false },
    };
    return {
        width: Math.max(width, 50),
        height,
        padding: [8, 18, 0, 0],
        cursor: { drag: { x: false, y: false }, points: { size: 6 } },
        legend: { show: true, live: true },
        // Without the pointer the legend has the newest figures.
        hooks: {
            ready: [showNewest],
            setData: [showNewest],
            setCursor: [
                (plot) => {
                    if (plot.cursor.idx == null) showNewest(plot);
                },
            ],
        },
        scales: { x: { time: isTime }, y: { range: (_, __, max) => [0, most ?? (max > 0 ? max * 1.1 : 1)] } },
        axes: [
            { ...axis, space: 70, size: 26, ...(isTime ? { values: (_, ticks) => ticks.map(clockTick(ticks)) } : {}) },
            { ...axis, size: 56, space: 32, values: (_, ticks) => ticks.map(write) },
        ],
        series: [
            isTime
                ? { value: (_, v) => (v === null ? "–" : new Date(v * 1000).toLocaleTimeString("en-GB")) }
                : { label: "second" },
            ...names.map((name, i) => ({
                label: name,
                stroke: colour(LINES[i % LINES.length] ?? "line-1"),
                width: 1.5,
                // A figure between two gaps has no line: it is a point.
                points: { show: true, size: 4, fill: colour(LINES[i % LINES.length] ?? "line-1"), filter: alone },
                spanGaps: false,
                value: (_: uPlot, v: number | null) => write(v),
            })),
        ],
    };
}

function alone(plot: uPlot, series: number): number[] {
    const values = plot.data[series] ?? [];
    const isGap = (value: number | null | undefined): boolean => value === null || value === undefined;
    return [...values.keys()].filter(
        (i) => !isGap(values[i]) && isGap(values[i - 1] ?? null) && isGap(values[i + 1] ?? null),
    );
}

function showNewest(plot: uPlot): void {
    const length = plot.data[0].length;
    if (length > 0 && plot.legend !== undefined) plot.setLegend({ idx: length - 1 }, false);
}

function clockTick(ticks: readonly number[]): (at: number) => string {
    const isShort = (ticks[1] ?? 0) - (ticks[0] ?? 0) < 60;
    return (at) =>
        new Date(at * 1000).toLocaleTimeString("en-GB", isShort ? {} : { hour: "2-digit", minute: "2-digit" });
}
