"""The engine's flags as the user wrote them, and words for messages."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_vllm.errors import ConfigError

EngineFlags = Mapping[str, str | None]


_SHORT_FLAGS = {
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-dp": "data_parallel_size",
    "-n": "nnodes",
    "-r": "node_rank",
    "-dpn": "data_parallel_rank",
    "-dpr": "data_parallel_start_rank",
    "-dpl": "data_parallel_size_local",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-dpm": "data_parallel_multi_port_external_lb",
}
"""vLLM's short flags that our rules look at."""


def engine_flags(argv: Sequence[str]) -> dict[str, str | None]:
    """The engine's flags as the user wrote them: '--block-size 16' → {'block_size': '16'}.

    An object in pieces is put together: '--kv-transfer-config.kv_role kv_both' → its JSON.
    """
    found: dict[str, str | None] = {}
    objects: dict[str, dict[str, object]] = {}
    for word, value in _words(argv):
        head, *keys = word.split(".")
        name = _SHORT_FLAGS.get(head, head.lstrip("-").replace("-", "_"))
        if keys:
            _put(objects.setdefault(name, {}), keys, value or "")
        else:
            found[name] = value
    # vLLM 0.30 puts these last: they replace a whole object.
    return found | {name: json.dumps(merged) for name, merged in objects.items()}


def _words(argv: Sequence[str]) -> list[tuple[str, str | None]]:
    """Each flag with its first value, if it has one."""
    found: list[tuple[str, str | None]] = []
    for word in argv:
        flag_word, has_value, value = word.partition("=")
        if word.startswith("--") or flag_word in _SHORT_FLAGS:
            found.append((flag_word, value if has_value else None))
        elif found and found[-1][1] is None:
            found[-1] = (found[-1][0], word)
    return found


def _put(merged: dict[str, Any], keys: Sequence[str], text: str) -> None:
    """As vLLM reads '--flag.key value': the value is JSON where it can be, 'key+' appends words to a list."""
    *outer, key = keys
    for name in outer:
        if not isinstance(merged.get(name), dict):
            merged[name] = {}
        merged = merged[name]
    if key.endswith("+"):
        before = merged.get(key[:-1])
        merged[key[:-1]] = [*(before if isinstance(before, list) else ()), *text.split(",")]
        return
    try:
        merged[key] = json.loads(text)
    except json.JSONDecodeError:
        merged[key] = text


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def json_object(name: str, text: str) -> dict[str, object]:
    """The JSON object in `text`, or a refusal that names the flag."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as exc:
        raise ConfigError(f"{name} is not JSON: {exc}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object")
    return value


def port_is_a_port(name: str, port: int | None) -> None:
    if port is not None and not 0 <= port <= 65535:
        raise ConfigError(f"{name} {port} is not a port; use 0 to 65535")


def threads_are_a_count(threads: int | None) -> None:
    if threads is not None and threads < 1:
        raise ConfigError(f"--runtime-threads {threads} must be 1 or more, or left out")


def traces_have_an_address(endpoint: str | None) -> None:
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint {endpoint!r} is not a URL; write for example http://127.0.0.1:4317"
        )
