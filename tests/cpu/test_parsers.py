"""Tests tool calls: the worker advertises the parser, and the frontend applies it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.stack import Stack, stack
from harness.warm import Zygote

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]


@pytest.fixture(scope="module")
def parsing(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("parsers")) as made:
        made.start_frontend()
        warm.start_worker(made, model, "--dyn-tool-call-parser", "hermes")
        yield made.wait_ready(120)


def test_tool_call_is_parsed(parsing: Stack) -> None:
    answer = parsing.openai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "weather in Bonn?"}],
        tools=TOOLS,  # type: ignore[arg-type]
        max_tokens=100,
        temperature=0,
        extra_body={"guided_choice": [CALL]},
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    call = choice.message.tool_calls[0].function  # type: ignore[union-attr]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Bonn"})
