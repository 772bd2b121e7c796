"""Reads what Prometheus would read."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


def samples(text: str) -> Iterator[Sample]:
    """Each series of an exposition."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def total(text: str, name: str, **labels: object) -> float:
    """The sum over a metric's series, or over those with these labels."""
    wanted = {label: str(value) for label, value in labels.items()}.items()
    return sum(one.value for one in samples(text) if one.name == name and wanted <= one.labels.items())


def series(sample: Sample) -> str:
    """Its name and labels, as `name{label="value"}`."""
    labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
    return f"{sample.name}{{{labels}}}" if labels else str(sample.name)
