"""Reads counters from a page of Prometheus metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


def total(page: str, name: str, labels: Mapping[str, str] | None = None) -> float | None:
    """Return the sum of a counter over its series with these labels; None if it has none.

    The name may have `_total` or not.
    """
    from prometheus_client.parser import text_string_to_metric_families  # --help does not need it

    names = {name, f"{name}_total"}
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:  # not a page of metrics
        return None
    wanted = (labels or {}).items()
    samples = (sample for family in families for sample in family.samples if sample.name in names)
    found = [sample.value for sample in samples if wanted <= sample.labels.items()]
    return sum(found) if found else None
