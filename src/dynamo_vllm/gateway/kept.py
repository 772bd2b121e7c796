"""Counts the bytes that are kept for each tenant, so that no request has to add them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_vllm.gateway.database import Transaction


def add(t: Transaction, tenant: str, kind: str, size: int) -> int:
    """Return what is kept now."""
    t.execute(
        "INSERT INTO gateway_kept (tenant, kind, bytes) VALUES (?, ?, ?)"
        " ON CONFLICT (tenant, kind) DO UPDATE SET bytes = gateway_kept.bytes + excluded.bytes",
        tenant,
        kind,
        size,
    )
    return kept(t, tenant, kind)


def kept(t: Transaction, tenant: str, kind: str) -> int:
    found = t.one("SELECT bytes FROM gateway_kept WHERE tenant = ? AND kind = ?", tenant, kind)
    return 0 if found is None else int(found[0])
