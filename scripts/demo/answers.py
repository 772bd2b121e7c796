"""What a model answered, taken apart, and whether it is right."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from demo.generator.base import Call, Example

THINK_END = "</think>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Answer:
    content: str
    calls: tuple[Call, ...] = ()
    thought: str = ""


def parse(text: str) -> Answer:
    """The text of an assistant's turn, from its `<think>` on; as hermes and qwen3 parsers read it."""
    thought, _, rest = text.rpartition(THINK_END)
    before, *blocks = rest.split(CALL_START)
    calls = tuple(_call(block.partition(CALL_END)[0]) for block in blocks)
    return Answer(before.strip(), calls, thought.removeprefix("<think>").strip())


def _call(block: str) -> Call:
    try:
        raw = json.loads(block)
        return Call(raw["name"], raw["arguments"])
    except (ValueError, KeyError, TypeError):
        return Call(f"not a call: {block}", {})


def is_right(example: Example, answer: Answer) -> bool:
    wanted = example.answer
    if wanted.calls or answer.calls:
        return _plain(wanted.calls) == _plain(answer.calls)
    if example.schema is not None:
        return fits(answer.content, example.schema)
    return answer.content == wanted.content


def _plain(calls: tuple[Call, ...]) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in calls]


def fits(text: str, schema: Mapping[str, Any]) -> bool:
    """Whether the text is JSON of a schema of the kind the generator writes: one flat object."""
    try:
        value = json.loads(text)
    except ValueError:
        return False
    known = schema["properties"]
    if not isinstance(value, dict) or any(key not in value for key in schema["required"]):
        return False
    if schema.get("additionalProperties") is False and set(value) - set(known):
        return False
    return all(_has_type(value[key], known[key]) for key in value if key in known)


def _has_type(value: Any, schema: Mapping[str, Any]) -> bool:
    if "enum" in schema and value not in schema["enum"]:
        return False
    if schema["type"] == "integer":
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return isinstance(value, {"string": str, "boolean": bool}[schema["type"]])
