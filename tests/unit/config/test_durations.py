"""Durations and moments as people write them."""

from __future__ import annotations

import pytest

from dynamo_vllm.config import durations
from dynamo_vllm.errors import ConfigError


def test_duration_has_a_unit() -> None:
    seconds = {"45s": 45, "1.5m": 90, "12h": 43200, "30d": 2592000}
    assert {text: durations.duration("--x", text) for text in seconds} == seconds
    for text in ("30", "d", "-1d", "1 d", "1d1h", ""):
        with pytest.raises(ConfigError, match="write for example 30d"):
            durations.duration("--x", text)


def test_moment_is_a_date_in_utc_or_a_time_ago() -> None:
    seconds = {"1970-01-02": 86400, "1970-01-01T01:00": 3600, "1970-01-01T01:00+01:00": 0, "1d": 913600}
    assert {text: durations.moment("--x", text, 1_000_000) for text in seconds} == seconds
    assert (durations.date(86399), durations.date(None)) == ("1970-01-01 23:59", "never")
