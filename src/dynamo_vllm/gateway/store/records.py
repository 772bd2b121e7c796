"""Describes what workers report of a request's tokens, and what several reports of it say together.

A worker reports each prompt of a request (a part) when it leaves, until a gateway confirms it. Reports may
come several times and in any order. Merging them is a minimum or maximum of each field, so the order does not
matter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dynamo_vllm.gateway.store.buckets import day_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.serving.usage.record import UsageRecord

_ORDER = ("moved", "failed", "aborted", "finished")


class Part(NamedTuple):
    """What is known of one part: a row of the database."""

    request_id: str
    part: str
    key: str
    tenant: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    total_tokens: int
    outcome: str
    at: float

    @classmethod
    def of(cls, record: UsageRecord, tenant: str) -> Part:
        total = record.prompt_tokens + record.completion_tokens
        return cls(
            *(record.request_id, record.part, record.key_id, tenant, record.model),
            *(record.prompt_tokens, record.cached_tokens, total, record.outcome, record.at),
        )

    def merged(self, other: Part) -> Part:
        """A request that moved has its earlier tokens in the later prompt: the largest total counts,
        the smallest prompt is the client's own, and only what was cached of that was saved."""
        prompt, more_cached = min(
            (self.prompt_tokens, -self.cached_tokens), (other.prompt_tokens, -other.cached_tokens)
        )
        return Part(
            *(self.request_id, self.part),
            *(min(self.key, other.key), min(self.tenant, other.tenant), min(self.model, other.model)),
            *(prompt, -more_cached, max(self.total_tokens, other.total_tokens)),
            *(max(self.outcome, other.outcome, key=_ORDER.index), min(self.at, other.at)),
        )

    @property
    def is_final(self) -> bool:
        return self.outcome != "moved"


class Place(NamedTuple):
    """Where usage is summed up."""

    day: int
    key: str
    tenant: str
    model: str


class Sums(NamedTuple):
    """Sums, or their difference."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def plus(self, other: Sums) -> Sums:
        return Sums(*(one + more for one, more in zip(self, other, strict=True)))

    def minus(self, other: Sums) -> Sums:
        return Sums(*(one - less for one, less in zip(self, other, strict=True)))


NOTHING = Sums()


def usage_of(parts: Iterable[Part]) -> dict[Place, Sums]:
    """Return what the parts of one request add to the sums; the request itself counts where it began."""
    found: dict[Place, Sums] = {}
    for number, one in enumerate(sorted(parts, key=lambda part: (part.at, part.part))):
        place = Place(day_of(one.at), one.key, one.tenant, one.model)
        completion = one.total_tokens - one.prompt_tokens
        sums = Sums(int(number == 0), one.prompt_tokens, one.cached_tokens, completion)
        found[place] = found.get(place, NOTHING).plus(sums)
    return found
