"""Refuses unknown parsers at once; the runtime would refuse them only after the engine has started."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from dynamo._core import get_reasoning_parser_names, get_tool_parser_names

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.config.options import WorkerOptions

NEAREST = 3


def refuse_unknown(options: WorkerOptions) -> None:
    if options.use_vllm_tokenizer:  # the frontend parses only tokens
        return
    _refuse("--tool-call-parser", options.tool_call_parser, get_tool_parser_names())
    _refuse("--reasoning-parser", options.reasoning_parser, get_reasoning_parser_names())


def _refuse(flag: str, name: str | None, known: Iterable[str]) -> None:
    names = sorted(known)
    if name is None or name in names:
        return
    near = difflib.get_close_matches(name, names, NEAREST)
    hint = f"nearest: {', '.join(near)}" if near else f"known names: {', '.join(names)}"
    raise ConfigError(f"{flag} {name} is unknown to the frontend; {hint}")
