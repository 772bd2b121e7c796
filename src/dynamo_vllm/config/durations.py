"""Reads durations such as 30d and 12h, and moments that are a date or a duration ago."""

from __future__ import annotations

import datetime
import math
import re

from dynamo_vllm.errors import ConfigError

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)


def duration(flag: str, text: str) -> float:
    """Return seconds; a number needs its unit."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"{flag} {text!r} is not a duration; write for example 30d, 12h, 90m or 45s")
    return float(found[1]) * SECONDS[found[2]]


def moment(flag: str, text: str, now: float) -> float:
    """Return the time of a date (its beginning in UTC), of a date with a time, or of a duration ago."""
    if _DURATION.fullmatch(text.strip()) is not None:
        return now - duration(flag, text)
    try:
        found = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ConfigError(
            f"{flag} {text!r} is not a time; write a date such as 2026-01-31, or a duration ago such as 30d"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).timestamp()


def date(seconds: float | None, missing: str = "never") -> str:
    """Write the day and minute in UTC."""
    if seconds is None or not math.isfinite(seconds):
        return missing
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%d %H:%M")
