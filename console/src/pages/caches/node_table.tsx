// The rows of the heat map as text.
import type { JSX } from "preact";
import { duration, plural, whole } from "../../format";
import { workerName } from "../../live";
import { Table } from "../../ui/table";
import type { Row } from "./rows";

const MOST_ROWS = 100;
const MOST_WORKERS = 6;

export function placesOf(row: Row): string {
    const places = Object.entries(row.node.workers).map(([id, held]) => {
        const tiers = (["device", "host", "disk"] as const)
            .filter((tier) => (held[tier] ?? 0) > 0)
            .map((tier) => `${held[tier]} ${tier}`);
        return `${workerName(id)}: ${tiers.join(", ")}`;
    });
    if (places.length === 0) return "nowhere now";
    const more = places.length - MOST_WORKERS;
    return places.slice(0, MOST_WORKERS).join("; ") + (more > 0 ? `; and ${plural(more, "other worker")}` : "");
}

export function NodeTable({ rows }: { rows: readonly Row[] }): JSX.Element {
    const shown = rows.slice(0, MOST_ROWS);
    return (
        <>
            <Table
                caption="Prefixes"
                rows={shown}
                keyOf={(row) => String(row.node.id)}
                columns={[
                    { title: "Run", isName: true, cell: (row) => row.node.id },
                    { title: "After run", isNumber: true, cell: (row) => row.node.parent ?? "–" },
                    { title: "Blocks", isNumber: true, cell: (row) => whole(row.node.blocks) },
                    { title: "Blocks before", isNumber: true, cell: (row) => whole(row.node.depth) },
                    { title: "Requests", isNumber: true, cell: (row) => whole(row.node.used) },
                    {
                        title: "Last used",
                        isNumber: true,
                        cell: (row) =>
                            row.node.last_used_seconds === null ? "–" : `${duration(row.node.last_used_seconds)} ago`,
                    },
                    { title: "Where", isWide: true, cell: placesOf },
                ]}
            />
            {rows.length > shown.length ? (
                <p class="hint">
                    The first {shown.length} of {whole(rows.length)} runs.
                </p>
            ) : null}
        </>
    );
}
