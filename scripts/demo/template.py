"""Renders conversations with the model's own chat template, as servers do."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demo.generator.base import Example, Turn

TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def render(example: Example) -> str:
    """The whole conversation, as it is trained on."""
    return _render(messages(example.turns), example.tools)


def prompt(example: Example, *, thinking: bool = True) -> str:
    """All but the last turn, and the beginning of the answer."""
    return _render(
        messages(example.turns[:-1]), example.tools, add_generation_prompt=True, enable_thinking=thinking
    )


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """As a client of the OpenAI API sends them."""
    return [_message(turn) for turn in turns]


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": turn.role, "content": turn.content}
    if turn.pictures:
        text, pictures = {"type": "text", "text": turn.content}, [{"type": "image"}] * turn.pictures
        message["content"] = [text, *pictures] if turn.pictures_last else [*pictures, text]
    if turn.role == "assistant" and turn.thought:
        message["reasoning_content"] = turn.thought
    if turn.role == "tool":
        message["tool_call_id"] = "call-0"
    if turn.calls:
        message["tool_calls"] = [
            {
                "id": f"call-{index}",
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": json.dumps(call.arguments, ensure_ascii=False),
                },
            }
            for index, call in enumerate(turn.calls)
        ]
    return message


def _render(said: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], **settings: Any) -> str:
    return _template().render(messages=said, tools=list(tools) or None, **settings)


@functools.cache
def _template() -> jinja2.Template:
    """Set up as transformers, vLLM and the frontend do: JSON with blanks, in the order given, unescaped."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
