// Orders the nodes of the prefix tree into rows.
import type { CacheNode } from "../../types";

export type Order = "tree" | "used" | "blocks";
export type TierChoice = "all" | "device" | "host" | "disk";

export interface Row {
    node: CacheNode;
    /** How many runs stand before it, for the indent. */
    level: number;
}

export function rowsOf(nodes: readonly CacheNode[], order: Order): Row[] {
    const tree = inTree(nodes);
    if (order === "used") return tree.sort((a, b) => b.node.used - a.node.used || b.node.blocks - a.node.blocks);
    if (order === "blocks") return tree.sort((a, b) => b.node.blocks - a.node.blocks);
    return tree;
}

/** Each node after its parent, the most used child first. A node whose parent was left out begins a tree. */
function inTree(nodes: readonly CacheNode[]): Row[] {
    const known = new Set(nodes.map((node) => node.id));
    const children = new Map<number | null, CacheNode[]>();
    for (const node of nodes) {
        const parent = node.parent !== null && known.has(node.parent) ? node.parent : null;
        const list = children.get(parent);
        if (list === undefined) children.set(parent, [node]);
        else list.push(node);
    }
    for (const list of children.values()) list.sort((a, b) => b.used - a.used || a.id - b.id);
    const rows: Row[] = [];
    const stack: Row[] = (children.get(null) ?? []).map((node) => ({ node, level: 0 })).reverse();
    while (stack.length > 0 && rows.length < nodes.length) {
        const row = stack.pop()!;
        rows.push(row);
        for (const child of (children.get(row.node.id) ?? []).toReversed())
            stack.push({ node: child, level: row.level + 1 });
    }
    return rows;
}
