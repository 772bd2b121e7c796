"""Explains why a request went to a worker: what each candidate had cached, was doing, and would have cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dynamo_vllm.console.decisions.cost import AGGREGATED, DECODE, PREFILL, cost, counted_blocks
from dynamo_vllm.console.decisions.load import Stay
from dynamo_vllm.console.decisions.records import Ended
from dynamo_vllm.console.decisions.shapes import NONE, Load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.console.decisions.block_map import BlockMap
    from dynamo_vllm.console.decisions.load import PastLoad
    from dynamo_vllm.console.decisions.mirror import Booking, Mirror
    from dynamo_vllm.console.decisions.shapes import Frontend, Overlap, Worker

SLACK_SECONDS = 0.005
"""How far the router's view of caches may be from the mirror's: messages take about a millisecond."""
MOST_STATES = 32
CLEAR_SECONDS = 0.025
"""Times in records are whole milliseconds, and a busy frontend books later than it answers: what happened
closer to a choice may have been before or after it."""
SAME = 0.01


class Cached(NamedTuple):
    """What candidates had of a prompt when the router compared them."""

    overlaps: Mapping[Worker, Overlap]
    is_exact: bool
    fits: bool
    """Whether the chosen worker has what the router said."""


@dataclass(slots=True)
class Decision:
    """One choice of a worker. A request has one for prefill and one for decode, and again if it moves."""

    phase: str
    attempt: int
    at: float
    chosen: Worker
    candidates: Sequence[Worker]
    cached: Cached
    prompt_tokens: int
    prompt_blocks: int
    block_size: int
    frontend: Frontend
    stay: Stay
    loads: Mapping[Worker, Load] | None = None
    """As the frontend published them; None if they are found out afterwards."""
    are_loads_exact: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def is_booked(self) -> bool:
        return self.loads is not None


def is_booked_whole(ended: Ended, bookings: Sequence[Booking]) -> bool:
    """Return whether no choice is without a booking: a frontend has a publisher for each phase, and of one
    that was just connected the first messages are lost.
    """
    phases = {booking.is_prefill for booking in bookings}
    is_whole = False in phases and (ended.prefill_worker is None or True in phases)
    return is_whole or ended.worker is None  # then the record says less


def stays(ended: Ended, frontend: Frontend) -> list[Stay]:
    """Return where a request without bookings was, in the order in which workers were chosen."""
    if ended.worker is None:
        return []
    first = ended.first_token or ended.ended
    told = ended.counted_blocks or 0.0
    left = max(0, ended.input_tokens - round(told * ended.block_size))
    if ended.prefill_worker is None:
        return [Stay(ended.worker, frontend.name, ended.routed, first, ended.ended, left, ended.blocks)]
    # The first token is the prefill worker's; with it the frontend chooses a decode worker.
    return [
        Stay(ended.prefill_worker, frontend.name, ended.routed, first, first, left, ()),
        Stay(ended.worker, frontend.name, first, first, ended.ended, 0, ended.blocks),
    ]


def decisions(
    ended: Ended, bookings: Sequence[Booking], stays: Sequence[Stay], mirror: Mirror, frontend: Frontend
) -> list[Decision]:
    """Return the choices of an ended request, in the order in which they were made."""
    if bookings:
        return _booked(ended, bookings, mirror, frontend)
    phases = (AGGREGATED,) if len(stays) == 1 else (PREFILL, DECODE)
    return [_chosen(phase, stay, ended, mirror, frontend) for phase, stay in zip(phases, stays, strict=False)]


def _chosen(phase: str, stay: Stay, ended: Ended, mirror: Mirror, frontend: Frontend) -> Decision:
    told = None if phase == DECODE else ended.counted_blocks
    candidates = mirror.candidates(stay.worker, stay.began)
    times = (ended.received, stay.began)
    return Decision(
        phase,
        1,
        stay.began,
        stay.worker,
        candidates,
        cached_at(mirror.blocks, ended.blocks, candidates, stay.worker, times, told, frontend),
        ended.input_tokens,
        len(ended.blocks),
        ended.block_size,
        frontend,
        stay,
    )


def _booked(ended: Ended, bookings: Sequence[Booking], mirror: Mirror, frontend: Frontend) -> list[Decision]:
    has_prefill = any(booking.is_prefill for booking in bookings)
    found: list[Decision] = []
    # A request is booked for both phases over channels of their own, so the later may be read first.
    for booking in sorted(bookings, key=lambda one: (one.at, not one.is_prefill)):
        phase = PREFILL if booking.is_prefill else DECODE if has_prefill else AGGREGATED
        attempt = 1 + sum(1 for one in found if one.phase == phase)
        blocks = booking.blocks if attempt > 1 and booking.blocks else ended.blocks
        told = ended.counted_blocks if phase != DECODE and attempt == 1 else None
        candidates = sorted(booking.loads)
        times = (ended.received if attempt == 1 else booking.at, booking.at)
        cached = cached_at(mirror.blocks, blocks, candidates, booking.worker, times, told, frontend)
        tokens = ended.input_tokens
        if attempt > 1 and phase != DECODE:
            own = counted_blocks(frontend.weights, cached.overlaps.get(booking.worker, NONE))
            tokens = booking.prefill_tokens + round(own * ended.block_size)
        kept = () if phase == PREFILL else blocks
        stay = Stay(
            booking.worker, frontend.name, booking.at, booking.at, ended.ended, booking.prefill_tokens, kept
        )
        found.append(
            Decision(
                phase,
                attempt,
                booking.at,
                booking.worker,
                candidates,
                cached,
                tokens,
                len(blocks),
                ended.block_size,
                frontend,
                stay,
                booking.loads,
                booking.is_exact and not mirror.did_others_book(booking),
            )
        )
    return found


def ended_by_bookings(bookings: Sequence[Booking], at: float, mirror: Mirror) -> Ended:
    """Return what is known of a request without its record; its prompt's length up to a few tokens."""
    first, last = bookings[0], bookings[-1]
    prefill = next((one.worker for one in bookings if one.is_prefill), None)
    member = mirror.member(last.worker.instance)
    size = 0 if member is None else member.block_size
    blocks = tuple(next((one.blocks for one in bookings if one.blocks), ()))
    overlap = mirror.blocks.overlaps(blocks, first.at).get(first.worker, NONE)
    return Ended(
        id=first.request,
        received=first.at,
        routed=first.at,
        first_token=None,
        ended=at,
        input_tokens=first.prefill_tokens + sum(overlap) * size,
        output_tokens=0,
        cached_tokens=sum(overlap) * size,
        counted_blocks=None,
        transfer_seconds=None,
        worker=last.worker,
        prefill_worker=prefill,
        block_size=size,
        blocks=blocks,
    )


def cached_at(
    blocks: BlockMap,
    hashes: Sequence[int],
    candidates: Sequence[Worker],
    chosen: Worker,
    times: tuple[float, float],
    told: float | None,
    frontend: Frontend,
) -> Cached:
    """Return what candidates had when the router compared them, within these times.

    It compares them before it queues a request. If caches changed meanwhile, the state is taken in which
    the chosen worker has as many blocks as the router `told`.
    """
    begin, end = times
    changes = blocks.changes_between(hashes, begin - SLACK_SECONDS, end + SLACK_SECONDS)
    moments = sorted((begin - SLACK_SECONDS, end, *changes), key=lambda one: abs(one - end))[:MOST_STATES]
    states: list[dict[Worker, Overlap]] = []
    for moment in moments if changes else (end,):
        found = blocks.overlaps(hashes, moment)
        state = {worker: found[worker] for worker in candidates if worker in found}
        if state not in states:
            states.append(state)
    fitting = [
        state
        for state in states
        if told is None or abs(counted_blocks(frontend.weights, state.get(chosen, NONE)) - told) < SAME
    ]
    is_known = all(blocks.is_known(worker, begin) for worker in candidates)
    return Cached((fitting or states)[0], is_known and len(fitting) == 1, bool(fitting))


def shown(decision: Decision, past: PastLoad, settled: float, name: Callable[[int], str]) -> dict[str, Any]:
    """Return a decision for the page; all requests that were active before `settled` have ended."""
    weights = decision.frontend.weights
    loads = decision.loads
    notes = list(decision.notes)
    are_loads_exact = decision.are_loads_exact
    if loads is None:
        only = None if decision.frontend.is_synced else decision.frontend.name
        loads = past.at(decision.candidates, decision.stay, only)
        are_loads_exact = (
            not decision.frontend.is_synced  # else it has booked the request, but nobody heard of it
            and decision.at <= settled
            and past.reaches(decision.at)
            and past.is_clear(decision.stay, only, CLEAR_SECONDS)
        )
    if not are_loads_exact:
        notes.append(
            "Other requests began or ended at the same time; the router may have known of them or not."
            if decision.is_booked
            else "Loads are worked out from the times of ended requests, to about a millisecond."
        )
    are_caches_exact = decision.cached.is_exact or decision.phase == DECODE  # which costs no prompt
    if not are_caches_exact:
        notes.append(
            "Caches changed at the same time."
            if decision.cached.fits
            else "The router counted other cached blocks than these."
        )
    costs = {worker: _cost(decision, loads, worker) for worker in decision.candidates}
    is_least = costs[decision.chosen] <= min(costs.values()) + SAME
    if not weights.is_recomputable:
        notes.append(f"The router ({weights.router}) does not choose by these costs alone.")
    elif not is_least:
        notes.append("Another worker looks cheaper here: something changed within a millisecond.")
    return {
        "phase": decision.phase,
        "attempt": decision.attempt,
        "at": decision.at,
        "exact": are_caches_exact and are_loads_exact and weights.is_recomputable and is_least,
        "notes": notes,
        "block_size": decision.block_size,
        "prompt_blocks": decision.prompt_blocks,
        "formula": {
            "overlap_weight": weights.overlap,
            "credit": weights.credit,
            "host": weights.host,
            "disk": weights.disk,
            "request_blocks": weights.request_blocks,
        },
        "candidates": [
            {
                "worker": name(worker.instance),
                "rank": worker.rank,
                "overlap": decision.cached.overlaps.get(worker, NONE)._asdict(),
                "active_requests": loads.get(worker, Load()).requests,
                "active_prefill_tokens": loads.get(worker, Load()).prefill_tokens,
                "active_blocks": loads.get(worker, Load()).blocks,
                "cost": round(costs[worker], 3),
                "is_chosen": worker == decision.chosen,
            }
            for worker in decision.candidates
        ],
    }


def _cost(decision: Decision, loads: Mapping[Worker, Load], worker: Worker) -> float:
    return cost(
        decision.phase,
        decision.frontend.weights,
        decision.cached.overlaps.get(worker, NONE),
        loads.get(worker, Load()),
        decision.prompt_tokens,
        decision.block_size or 1,
    )
