// Says in a sentence or two why the router chose a worker.
import { percent, plural, whole } from "../../format";
import { workerName } from "../../live";
import type { Candidate, Decision } from "../../types";

export interface Parts {
    /** Blocks that are left to compute, weighted. */
    compute: number;
    blocks: number;
    requests: number;
}

export function total(overlap: Candidate["overlap"]): number {
    return overlap.device + overlap.host + overlap.disk;
}

/** Returns the terms of the cost, as far as the formula is known. */
export function partsOf(decision: Decision, candidate: Candidate): Parts | null {
    const { formula } = decision;
    if (formula === null) return null;
    const { device, host, disk } = candidate.overlap;
    const left =
        candidate.active_prefill_tokens / decision.block_size +
        decision.prompt_blocks -
        formula.credit * device -
        formula.host * host -
        formula.disk * disk;
    return {
        compute: decision.phase === "decode" ? 0 : formula.overlap_weight * Math.max(0, left),
        blocks: decision.phase === "prefill" ? 0 : candidate.active_blocks,
        requests: formula.request_blocks * candidate.active_requests,
    };
}

export function explain(decision: Decision): string {
    const { candidates } = decision;
    const chosen = candidates.find((one) => one.is_chosen);
    if (chosen === undefined) return "The router's choice is not among the workers that are known here.";
    const name = nameOf(chosen);
    if (candidates.length === 1) return `${name} was the only worker that could take it.`;
    if (chosen.cost === null) return `${name} was chosen; how the router weighed the others is not known.`;
    const others = candidates.filter((one) => !one.is_chosen && one.cost !== null).sort((a, b) => a.cost! - b.cost!);
    const next = others[0];
    if (next === undefined) return `${name} was chosen at a cost of ${whole(chosen.cost)}.`;
    return `${opening(decision, name, chosen, next)} ${cacheSentence(decision, chosen, candidates)} ${difference(decision, chosen, next)}`;
}

function opening(decision: Decision, name: string, chosen: Candidate, next: Candidate): string {
    if (chosen.cost! < next.cost!)
        return `${name} was chosen: its cost of ${whole(chosen.cost)} is the lowest of ${decision.candidates.length}.`;
    if (chosen.cost === next.cost)
        return `${name} was chosen: ${nameOf(next)} costs the same (${whole(chosen.cost)}), and the router takes one of the cheapest.`;
    return `${name} was chosen although ${nameOf(next)} looks cheaper here (${whole(next.cost)} against ${whole(chosen.cost)}): the load changed while the router decided.`;
}

function cacheSentence(decision: Decision, chosen: Candidate, all: readonly Candidate[]): string {
    if (decision.phase === "decode")
        return "For decode only the load counts; the prompt's cache comes from the prefill worker.";
    const most = Math.max(...all.map((one) => total(one.overlap)));
    const own = total(chosen.overlap);
    if (most === 0) return "No worker had any of the prompt in its cache, so the load decided.";
    const share = `${plural(own, "block")} of ${decision.prompt_blocks} (${percent(own / Math.max(1, decision.prompt_blocks))})`;
    if (own === most) return `It had the most of the prompt in its cache: ${share}.`;
    if (own === 0)
        return `It had none of the prompt in its cache; another had ${plural(most, "block")} but more to do.`;
    return `It had ${share} in its cache; another had ${plural(most, "block")} but more to do.`;
}

/** Names the term that speaks most for the chosen one against the next. */
function difference(decision: Decision, chosen: Candidate, next: Candidate): string {
    const own = partsOf(decision, chosen);
    const theirs = partsOf(decision, next);
    if (own === null || theirs === null || chosen.cost! >= next.cost!) return "";
    const gains: [number, string][] = [
        [theirs.compute - own.compute, "it would have had more to compute"],
        [
            theirs.blocks - own.blocks,
            `its requests held ${plural(Math.abs(next.active_blocks - chosen.active_blocks), "block")} more`,
        ],
        [
            theirs.requests - own.requests,
            `it had ${plural(next.active_requests - chosen.active_requests, "more active request", "more active requests")}`,
        ],
    ];
    const [gain, reason] = gains.sort((a, b) => b[0] - a[0])[0]!;
    return gain <= 0 ? "" : `Next was ${nameOf(next)} (cost ${whole(next.cost)}): ${reason}.`;
}

export function nameOf(candidate: Candidate): string {
    const name = workerName(candidate.worker);
    return candidate.rank === null || candidate.rank === 0 ? name : `${name} rank ${candidate.rank}`;
}
