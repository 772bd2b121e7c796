// A table that becomes a list of cards on narrow screens; roles keep it a table for screen readers.
import type { ComponentChildren, JSX } from "preact";

export interface Column<Row> {
    title: string;
    cell: (row: Row) => ComponentChildren;
    isNumber?: boolean;
    /** Heads the card on a narrow screen, and is the row's header. */
    isName?: boolean;
    /** Long names or a bar: takes a whole line of the card. */
    isWide?: boolean;
}

interface TableProps<Row> {
    caption: string;
    columns: readonly Column<Row>[];
    rows: readonly Row[];
    keyOf: (row: Row, index: number) => string;
    markOf?: (row: Row) => string;
    empty?: string;
    showCaption?: boolean;
}

export function Table<Row>({
    caption,
    columns,
    rows,
    keyOf,
    markOf,
    empty = "Nothing yet.",
    showCaption = false,
}: TableProps<Row>): JSX.Element {
    if (rows.length === 0) return <p class="empty">{empty}</p>;
    return (
        <div class="table">
            <table role="table">
                <caption class={showCaption ? "" : "hidden"}>{caption}</caption>
                <thead role="rowgroup">
                    <tr role="row">
                        {columns.map((column) => (
                            <th
                                key={column.title}
                                role="columnheader"
                                scope="col"
                                class={column.isNumber === true ? "num" : ""}
                            >
                                {column.title}
                            </th>
                        ))}
                    </tr>
                </thead>
                <tbody role="rowgroup">
                    {rows.map((row, i) => (
                        <tr key={keyOf(row, i)} role="row" class={markOf?.(row) ?? ""}>
                            {columns.map((column) => cellOf(column, row))}
                        </tr>
                    ))}
                </tbody>
            </table>
        </div>
    );
}

function cellOf<Row>(column: Column<Row>, row: Row): JSX.Element {
    const kind = column.isNumber === true ? "num" : column.isWide === true ? "wide" : "";
    if (column.isName === true) {
        return (
            <th key={column.title} role="rowheader" scope="row" class={`name ${kind}`}>
                {column.cell(row)}
            </th>
        );
    }
    return (
        <td key={column.title} role="cell" class={kind} data-label={column.title}>
            {column.cell(row)}
        </td>
    );
}
