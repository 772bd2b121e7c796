"""Rules for the options of the benches that start their own workers, and what their written values mean."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from dynamo_vllm.config.options.frontend import ROUTERS
from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import PlaneOptions, PoolingBenchOptions, RoutingOptions, ScaleOptions

OURS = "dynamo-vllm"
"""How our own worker is called beside its peers."""


def peers(o: PlaneOptions) -> dict[str, list[str]]:
    """Commands by name."""
    found: dict[str, list[str]] = {}
    for word in o.peer:
        name, _, command = word.partition("=")
        if not name or not command or name == OURS or name in found:
            raise ConfigError(f"--peer {word!r} is not NAME=COMMAND with a unique name")
        found[name] = words(f"--peer {word!r}", command)
    return found


def modes(o: RoutingOptions) -> dict[str, list[str]]:
    """Flags of the frontend by the name of the mode."""
    found: dict[str, list[str]] = {}
    for word in o.mode:
        name, equals, given = word.partition("=")
        if not equals and name not in ROUTERS:
            raise ConfigError(f"--mode {word!r} is not a router; use {', '.join(ROUTERS)}, or NAME=FLAGS")
        if not name or name in found:
            raise ConfigError(f"--mode {word!r} needs a unique name")
        found[name] = words(f"--mode {word!r}", given) if equals else ["--router", name]
    return found


def words(source: str, text: str) -> list[str]:
    """Split as a shell would."""
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ConfigError(f"{source} cannot be split into words: {exc}") from None


def engine_args(o: RoutingOptions) -> list[str]:
    return words(f"--engine-args {o.engine_args!r}", o.engine_args)


def frontend_counts(o: ScaleOptions) -> list[int]:
    return counts("--frontends", o.frontends)


def worker_counts(o: ScaleOptions) -> list[int]:
    return counts("--workers", o.workers)


def counts(source: str, text: str) -> list[int]:
    """Read different whole numbers above 0 with commas between them, and return them in order."""
    words = [word.strip() for word in text.split(",")]
    found = {int(word) for word in words if word.isdecimal()}
    if len(found) < len(words) or 0 in found:
        raise ConfigError(f"{source} {text!r} is not a list of different counts, such as 1,2,4")
    return sorted(found)


def plane_counts_are_counts(o: PlaneOptions) -> None:
    bounds.at_least(o, 1, "concurrency", "requests", "input_tokens", "output_tokens")
    bounds.at_least(o, 1, "tokens_per_frame", "rounds")


def routing_counts_are_counts(o: RoutingOptions) -> None:
    bounds.at_least(o, 1, "workers", "rounds", "trace_block", "limit", "output_tokens", "cache_blocks")
    bounds.at_least(o, 0, "prefill_workers")
    bounds.above_zero(o, "rate_scale", "rate", "kv_offload_gb")


def routing_has_a_trace(o: RoutingOptions) -> None:
    if o.trace is None:
        raise ConfigError(
            "--trace FILE is needed: JSON lines in the Mooncake format, or the name of a trace (--help)"
        )


def only_a_simulation_has_its_options(o: RoutingOptions) -> None:
    if o.prefill_workers and not o.simulate:
        raise ConfigError("--prefill-workers is for --simulate; add it or leave --prefill-workers out")
    if o.simulate and (o.model or o.engine_args or o.rate):
        raise ConfigError("--simulate runs no engine; leave out --model, --engine-args and --rate")


def scale_counts_are_counts(o: ScaleOptions) -> None:
    bounds.at_least(o, 1, "streams", "requests", "input_tokens", "output_tokens", "rounds")
    bounds.at_least(o, 0, "cached_blocks", "token_ms")
    bounds.above_zero(o, "max_seconds", "ramp_seconds")


def ramp_has_one_request_per_stream(o: ScaleOptions) -> None:
    if o.requests and o.ramp_seconds:
        raise ConfigError("--ramp-seconds sends one request for each stream; leave --requests out")


def pooling_counts_are_counts(o: PoolingBenchOptions) -> None:
    bounds.at_least(o, 1, "items", "words", "concurrency", "requests", "rounds")
    bounds.above_zero(o, "timeout")


def servers(o: PoolingBenchOptions) -> dict[str, str]:
    """URLs by name."""
    found: dict[str, str] = {}
    for number, word in enumerate(o.server, start=1):
        name, equals, url = word.partition("=")
        if not equals:
            name, url = f"server-{number}" if len(o.server) > 1 else "server", word
        if not name or name in found or not url.startswith(("http://", "https://")):
            raise ConfigError(f"--server {word!r} is not URL, or NAME=URL with a unique name")
        found[name] = url.rstrip("/").removesuffix("/v1")
    return found


POOLING_RULES = (pooling_counts_are_counts, servers)
PLANE_RULES = (plane_counts_are_counts, peers)
ROUTING_RULES = (
    routing_counts_are_counts,
    routing_has_a_trace,
    only_a_simulation_has_its_options,
    modes,
    engine_args,
)
SCALE_RULES = (scale_counts_are_counts, ramp_has_one_request_per_stream, frontend_counts, worker_counts)
