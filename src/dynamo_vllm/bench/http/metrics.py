"""Reads counters from a page of Prometheus metrics."""

from __future__ import annotations


def total(page: str, name: str) -> float | None:
    """Return the sum of a counter over its series, named with or without `_total`; None if it has none."""
    from prometheus_client.parser import text_string_to_metric_families  # --help does not need it

    names = {name, f"{name}_total"}
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:  # not a page of metrics
        return None
    found = [sample.value for family in families for sample in family.samples if sample.name in names]
    return sum(found) if found else None
