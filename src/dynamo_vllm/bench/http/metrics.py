"""Reads counters from a page of Prometheus metrics."""

from __future__ import annotations


def total(page: str, name: str) -> float | None:
    """Sums a counter over its series, with or without `_total` behind its name; None where there is none."""
    from prometheus_client.parser import text_string_to_metric_families  # which --help need not pay for

    names = {name, f"{name}_total"}
    try:
        families = list(text_string_to_metric_families(page))
    except ValueError:  # no page of metrics
        return None
    found = [sample.value for family in families for sample in family.samples if sample.name in names]
    return sum(found) if found else None
