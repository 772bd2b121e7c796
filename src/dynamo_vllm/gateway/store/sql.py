"""Helps with SQL for many rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

    from dynamo_vllm.gateway.database import Row, Transaction

MOST_VALUES = 512
"""Values in one statement; older SQLite takes 999."""


def in_list(t: Transaction, sql: str, values: Collection[str]) -> list[Row]:
    """Return the rows of `sql`, which ends with `column IN`, for all values.

    The number of marks is a power of two, filled with the last value, so that there are few statements and
    the databases remember their plans.
    """
    wanted = list(values)
    rows: list[Row] = []
    for start in range(0, len(wanted), MOST_VALUES):
        some = wanted[start : start + MOST_VALUES]
        count = 1 << (len(some) - 1).bit_length()
        some += some[-1:] * (count - len(some))
        rows += t.all(f"{sql} ({','.join('?' * count)})", *some)
    return rows
