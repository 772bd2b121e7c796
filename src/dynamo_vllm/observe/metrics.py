"""Reads the text of a /metrics page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One sample of /metrics."""

    name: str
    labels: Mapping[str, str]
    value: float


def samples(text: str) -> list[MetricSample]:
    """Return every sample; none if the text is not that of a /metrics page."""
    from prometheus_client.parser import text_string_to_metric_families  # only some commands need it

    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return []
    return [MetricSample(s.name, s.labels, s.value) for family in families for s in family.samples]
