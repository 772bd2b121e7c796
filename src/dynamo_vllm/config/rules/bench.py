"""Rules for the options of `bench load`, and what its written values mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.rules import bounds, flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import LoadOptions, PoolingBenchOptions

SLO_NAMES = ("ttft", "itl", "tpot", "e2e")
DEFAULT_CONCURRENCY = "8"


def concurrencies(o: LoadOptions) -> list[int]:
    return [int(number) for number in _numbers("--concurrency", o.concurrency or DEFAULT_CONCURRENCY, int)]


def rates(o: LoadOptions) -> list[float]:
    return _numbers("--rate", o.rate or "", float)


def ramp(o: LoadOptions) -> tuple[float, float, int]:
    """First rate, last rate, number of stages."""
    words = (o.ramp or "").split(":")
    try:
        first, last, steps = float(words[0]), float(words[1]), int(words[2])
        if len(words) != 3 or not all(0 < rate < float("inf") for rate in (first, last)) or steps < 1:
            raise ValueError
    except (ValueError, IndexError):
        raise ConfigError(f"--ramp {o.ramp!r} is not A:B:STEPS, such as 1:20:5") from None
    return first, last, steps


def vocab(o: LoadOptions) -> tuple[int, int]:
    first, _, last = o.vocab.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ConfigError(f"--vocab {o.vocab!r} is not A:B with A below B, such as 10:900")
    return int(first), int(last)


def slo(o: LoadOptions) -> dict[str, float]:
    """Limits in ms by name."""
    limits = {}
    for word in filter(None, (o.slo or "").split(",")):
        name, _, value = word.partition("=")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = 0.0
        if name not in SLO_NAMES or not limits[name] > 0:  # false for NaN too
            raise ConfigError(f"--slo {word!r} is not NAME=MS with a name of {', '.join(SLO_NAMES)}")
    return limits


def watched(o: LoadOptions | PoolingBenchOptions) -> dict[str, int]:
    """Process ids by label."""
    found: dict[str, int] = {}
    for word in o.watch:
        label, _, pid = word.partition("=")
        if not label or not pid.isdecimal():
            raise ConfigError(f"--watch {word!r} is not LABEL=PID, such as worker=4711")
        if label in found:
            raise ConfigError(f"--watch names {label!r} twice; give each process its own label")
        found[label] = int(pid)
    return found


def body(o: LoadOptions) -> dict[str, object]:
    """Further fields of every request."""
    return flags.json_object("--body", o.body or "{}")


def _numbers(flag: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """Words between commas, all above 0."""
    try:
        found = [kind(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < number < float("inf") for number in found):
        word = "whole numbers" if kind is int else "numbers"
        raise ConfigError(f"{flag} {text!r} must be {word} above 0, separated by commas")
    return [*found]


def counts_are_counts(o: LoadOptions) -> None:
    bounds.at_least(o, 1, "input_tokens", "output_tokens", "prefix_tokens", "prefixes", "turns")
    bounds.at_least(o, 1, "trace_block", "trace_limit", "requests", "clients")
    bounds.at_least(o, 0, "warmup")
    bounds.at_least(o, 2, "context")


def times_are_times(o: LoadOptions) -> None:
    bounds.above_zero(o, "seconds", "timeout", "trace_speed")


def one_kind_of_load(o: LoadOptions) -> None:
    given = [name for name, _ in bounds.values(o, ("concurrency", "rate", "ramp"))]
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} are different kinds of load; give one of them")


def trace_has_a_file(o: LoadOptions) -> None:
    if o.prompts == "trace" and o.trace is None:
        raise ConfigError("--prompts trace needs --trace FILE")
    if o.prompts != "trace" and o.trace is not None:
        raise ConfigError(f"--trace {o.trace} is not read with --prompts {o.prompts}; add --prompts trace")


def written_values_can_be_read(o: LoadOptions) -> None:
    concurrencies(o)
    if o.rate is not None:
        rates(o)
    if o.ramp is not None:
        ramp(o)
    vocab(o)
    slo(o)
    watched(o)
    body(o)


RULES = (counts_are_counts, times_are_times, one_kind_of_load, trace_has_a_file, written_values_can_be_read)
