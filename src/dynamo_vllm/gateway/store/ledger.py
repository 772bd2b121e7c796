"""Counts what requests used, each token once, however often and in whichever order workers report it.

The rows of each request are kept for some days, so that a report that comes again changes nothing. The sums
per day, key, tenant and model stay; they change by the difference between what the rows said before and say
now.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.store import reservations as reserved
from dynamo_vllm.gateway.store.gathering import Gathered
from dynamo_vllm.gateway.store.keys import DEFAULT_TENANT, FIXED_PREFIX
from dynamo_vllm.gateway.store.records import NOTHING, Part, Place, Sums, usage_of
from dynamo_vllm.gateway.store.sql import in_list

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.serving.usage.record import UsageRecord

logger = logging.getLogger(__name__)
PRUNED_TOGETHER = 2000
_PART = "request_id, part, key, tenant, model, prompt_tokens, cached_tokens, total_tokens, outcome, at"
_SUMS = "requests, prompt_tokens, cached_tokens, completion_tokens"

Parts = dict[str, dict[str, Part]]


class Ledger:
    """Takes workers' records at one gateway. It belongs to one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._settle: Gathered[Sequence[UsageRecord], None] = Gathered(database, self._settle_all)
        self._tenants: dict[str, str] = {}
        """Of keys that were asked for; a key never changes its tenant."""

    async def settle(self, records: Sequence[UsageRecord]) -> None:
        """Count records. Once this returns, the worker may forget them."""
        if records:
            await self._settle(records)

    async def prune(self, before: float) -> int:
        """Forget the requests from before a time, and return how many rows that were. The sums stay.

        A record from before that time is dropped from now on: it may have been counted. So keep the rows
        longer than a worker may be unable to reach a gateway, a day at least.
        """
        await self._database.run(lambda t: _mark_pruned(t, before), exclusive=True)
        count = 0
        while found := await self._database.run(lambda t: _prune_some(t, before), exclusive=True):
            count += found
        return count

    def _settle_all(self, t: Transaction, lists: list[Sequence[UsageRecord]]) -> list[None]:
        records = self._counted(t, [record for some in lists for record in some])
        tenants = self._tenants_of(t, {record.key_id for record in records})
        before = _read_parts(t, {record.request_id for record in records})
        after = {request_id: dict(parts) for request_id, parts in before.items()}
        for record in records:
            parts = after.setdefault(record.request_id, {})
            part = Part.of(record, tenants[record.key_id])
            known = parts.get(part.part)
            parts[part.part] = part if known is None else known.merged(part)
        changed = {
            request_id: parts for request_id, parts in after.items() if parts != before.get(request_id)
        }
        _write_parts(t, before, changed)
        _write_sums(t, _difference(before, changed))
        _settle_reservations(t, changed)
        return [None] * len(lists)

    def _counted(self, t: Transaction, records: list[UsageRecord]) -> list[UsageRecord]:
        row = t.one("SELECT before FROM gateway_usage_pruned WHERE id = 1")
        oldest = row[0] if row is not None else 0.0
        found = [record for record in records if record.at >= oldest]
        if len(found) < len(records):
            logger.warning("%d records came too late to be counted", len(records) - len(found))
        return found

    def _tenants_of(self, t: Transaction, key_ids: Collection[str]) -> Mapping[str, str]:
        """Keys that are in no row, as those of the command line, belong to the default tenant."""
        unknown = [
            key_id
            for key_id in key_ids
            if key_id not in self._tenants and not key_id.startswith(FIXED_PREFIX)
        ]
        found = in_list(t, "SELECT id, tenant FROM gateway_keys WHERE id IN", unknown)
        self._tenants |= {str(key_id): str(tenant) for key_id, tenant in found}
        return {key_id: self._tenants.get(key_id, DEFAULT_TENANT) for key_id in key_ids}


def _difference(before: Parts, after: Parts) -> dict[Place, Sums]:
    found: defaultdict[Place, Sums] = defaultdict(Sums)
    for request_id, parts in after.items():
        for place, sums in usage_of(before.get(request_id, {}).values()).items():
            found[place] = found[place].minus(sums)
        for place, sums in usage_of(parts.values()).items():
            found[place] = found[place].plus(sums)
    return {place: sums for place, sums in found.items() if sums != NOTHING}


def _read_parts(t: Transaction, request_ids: Collection[str]) -> Parts:
    found: Parts = {}
    for row in in_list(t, f"SELECT {_PART} FROM gateway_usage_parts WHERE request_id IN", request_ids):
        part = Part(*row)
        found.setdefault(part.request_id, {})[part.part] = part
    return found


def _write_parts(t: Transaction, before: Parts, changed: Parts) -> None:
    rows = [
        part
        for request_id, parts in changed.items()
        for part in parts.values()
        if before.get(request_id, {}).get(part.part) != part
    ]
    if rows:
        t.many(_WRITE_PART, rows)


def _write_sums(t: Transaction, changes: Mapping[Place, Sums]) -> None:
    totals: defaultdict[str, Sums] = defaultdict(Sums)
    for place, sums in changes.items():
        totals[place.tenant] = totals[place.tenant].plus(sums)
    if changes:
        t.many(_ADD_SUMS, [(*place, *sums) for place, sums in changes.items()])
        t.many(_ADD_TOTALS, [(tenant, *sums) for tenant, sums in totals.items()])


def _settle_reservations(t: Transaction, changed: Parts) -> None:
    found = reserved.read(t, changed)
    for request_id, one in found.items():
        parts = changed[request_id].values()
        one.used = sum(part.total_tokens for part in parts)
        one.finals = sum(part.is_final for part in parts)
    reserved.settle(t, found.values())


def _mark_pruned(t: Transaction, before: float) -> None:
    t.execute("UPDATE gateway_usage_pruned SET before = ? WHERE id = 1 AND before < ?", before, before)


def _prune_some(t: Transaction, before: float) -> int:
    """Requests are forgotten whole: with some of its parts one would be counted as another request."""
    count = t.execute(
        "DELETE FROM gateway_usage_parts WHERE request_id IN (SELECT request_id FROM gateway_usage_parts AS p"
        " WHERE p.at < ? AND NOT EXISTS (SELECT 1 FROM gateway_usage_parts AS q"
        " WHERE q.request_id = p.request_id AND q.at >= ?) LIMIT ?)",
        *(before, before, PRUNED_TOGETHER),
    )
    return count + t.execute(
        "DELETE FROM gateway_reservations WHERE request_id IN (SELECT request_id FROM gateway_reservations"
        " WHERE is_open = 0 AND began < ? LIMIT ?)",
        *(before, PRUNED_TOGETHER),
    )


_WRITE_PART = (
    f"INSERT INTO gateway_usage_parts ({_PART}) VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT (request_id, part)"
    " DO UPDATE SET key = excluded.key, tenant = excluded.tenant, model = excluded.model,"
    " prompt_tokens = excluded.prompt_tokens, cached_tokens = excluded.cached_tokens,"
    " total_tokens = excluded.total_tokens, outcome = excluded.outcome, at = excluded.at"
)


def _adding(table: str, columns: str, marks: int) -> str:
    added = ", ".join(f"{name} = {table}.{name} + excluded.{name}" for name in _SUMS.split(", "))
    return (
        f"INSERT INTO {table} ({columns}, {_SUMS}) VALUES ({','.join('?' * marks)})"
        f" ON CONFLICT ({columns}) DO UPDATE SET {added}"
    )


_ADD_SUMS = _adding("gateway_usage", "day, key, tenant, model", 8)
_ADD_TOTALS = _adding("gateway_usage_totals", "tenant", 5)
