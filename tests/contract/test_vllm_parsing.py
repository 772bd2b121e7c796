"""Tests vLLM's parsers behind ours, with the demo model's tokenizer and no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.tokenizers import get_tokenizer
from vllm.tool_parsers import ToolParserManager

from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.parts import parsing as vllm_parsing
from dynamo_vllm.engine.vllm.parts.renderer import refusing
from dynamo_vllm.errors import ConfigError, InvalidRequest
from dynamo_vllm.job import AnswerPart, Output
from dynamo_vllm.models import demo
from dynamo_vllm.wire_openai import ChatBody

MODEL = str(demo.folder("chat"))
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zurich"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def model() -> Any:
    return AsyncEngineArgs(model=MODEL, enforce_eager=True).create_model_config()


def settings(**names: str) -> EngineSettings:
    return EngineSettings(model=MODEL, parses_answers=True, **names)  # type: ignore[arg-type]


BOTH = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}


def parsing(
    model: Any, wishes: dict[str, Any] | None = None, parsers: Mapping[str, str] = BOTH, **body: Any
) -> vllm_parsing.Parsing:
    found = vllm_parsing.parser_class(settings(**parsers), model)
    asked = ChatBody(messages=[{"role": "user", "content": "weather?"}], **body)
    return vllm_parsing.Parsing(found, get_tokenizer(model.tokenizer), model, asked, wishes or {})


def parts(made: vllm_parsing.Parsing, answer: str, prompt: str = "<|im_start|>assistant\n") -> AnswerPart:
    """Parses the answer token by token and joins the parts."""
    tokenizer = get_tokenizer(MODEL)
    choice = made.choice(tokenizer.encode(prompt, add_special_tokens=False))
    ids = tokenizer.encode(answer, add_special_tokens=False)
    outputs = [Output([token], text=tokenizer.decode([token])) for token in ids]
    outputs.append(Output([], text="", finish="stop", finished=True))
    found = [choice.part(output) for output in outputs]
    return AnswerPart(
        "".join(part.content for part in found),
        "".join(part.reasoning for part in found),
        [call for part in found for call in part.tool_calls],
    )


def test_thoughts_and_calls_come_apart(model: Any) -> None:
    found = parts(parsing(model, tools=[WEATHER]), f"<think>Which city?</think>{CALL}")
    assert (found.content, found.reasoning) == ("", "Which city?")
    first, *rest = found.tool_calls
    assert (first["index"], first["type"], first["function"]["name"]) == (0, "function", "get_weather")
    assert first["id"] and not any("id" in call for call in rest)
    arguments = "".join(call["function"].get("arguments", "") for call in found.tool_calls)
    assert json.loads(arguments) == {"city": "Zurich"}


def test_text_stays_text(model: Any) -> None:
    assert parts(parsing(model), "<think></think>Hello!") == AnswerPart("Hello!", "", [])
    assert parts(parsing(model, tools=[WEATHER]), "<think></think>Hello!") == AnswerPart("Hello!", "", [])


def test_calls_nobody_wants_stay_text(model: Any) -> None:
    found = parts(parsing(model, tools=[WEATHER], tool_choice="none"), f"<think></think>{CALL}")
    assert found == AnswerPart(CALL, "", [])


def test_template_without_thoughts_leaves_none_to_look_for(model: Any) -> None:
    made = parsing(model, {"enable_thinking": False})
    prompt = "<|im_start|>assistant\n<think></think>"
    assert parts(made, "Hello!", prompt) == AnswerPart("Hello!", "", [])


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_call_the_client_insists_on_is_a_constraint(model: Any, choice: Any) -> None:
    made = parsing(model, tools=[WEATHER], tool_choice=choice)
    assert made.guide is not None and "get_weather" in (made.guide.structural_tag or "")
    assert parts(made, f"<think></think>{CALL}").tool_calls


def test_call_that_may_be_is_none(model: Any) -> None:
    made = parsing(model, tools=[WEATHER])
    assert made.guide is None and made.reads_special_tokens


def test_odd_tools_are_refused_by_name(model: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"tools\.0\.function"):
        parsing(model, tools=[{"type": "function"}])


@pytest.mark.parametrize("name", ["tool_call_parser", "reasoning_parser"])
def test_parser_that_vllm_does_not_have_is_refused(model: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} nobody.*qwen3"):
        vllm_parsing.parser_class(settings(**{name: "nobody"}), model)


TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "repeats": True,
            "transform": {"function": "{content}"},
        },
    },
}
has_hf = pytest.mark.skipif("hf" not in ToolParserManager.list_registered(), reason="vLLM 0.32 brings it")


@pytest.fixture
def described(tmp_path: Path) -> Any:
    """A model whose tokenizer says how answers look, as those of newer ones do."""
    for file in Path(MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings_file = tmp_path / "tokenizer_config.json"
    told = json.loads(settings_file.read_text())
    settings_file.unlink()
    settings_file.write_text(json.dumps({**told, "response_template": TEMPLATE}))
    return AsyncEngineArgs(model=str(tmp_path), enforce_eager=True).create_model_config()


@has_hf
def test_parser_that_wants_to_see_every_request_sees_those_without_tools(described: Any) -> None:
    """Without the special tokens that it asks for it would not find the end of a turn."""
    alone = {"tool_call_parser": "hf"}
    bodies: list[dict[str, Any]] = [{}, {"tools": [WEATHER], "tool_choice": "none"}]
    for body in bodies:
        made = parsing(described, parsers=alone, **body)
        assert made.reads_special_tokens
        assert parts(made, "Hello!") == AnswerPart("Hello!", "", [])
    (call,) = parts(parsing(described, parsers=alone, tools=[WEATHER]), CALL).tool_calls
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_weather",
        {"city": "Zurich"},
    )


@has_hf
def test_tool_call_that_this_parser_cannot_promise_is_refused(described: Any) -> None:
    with pytest.raises(InvalidRequest, match="tool_choice"), refusing("tools"):
        parsing(described, parsers={"tool_call_parser": "hf"}, tools=[WEATHER], tool_choice="required")


@has_hf
def test_parsers_that_do_not_fit_are_refused_at_the_start(model: Any) -> None:
    with pytest.raises(ConfigError, match="cannot be combined"):
        vllm_parsing.parser_class(settings(tool_call_parser="hf", reasoning_parser="qwen3"), model)
    with pytest.raises(ConfigError, match="not for the tokenizer of .*response_template"):
        vllm_parsing.parser_class(settings(tool_call_parser="hf"), model)


def test_parser_whose_marks_the_tokenizer_does_not_have_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="not for the tokenizer of"):
        vllm_parsing.parser_class(settings(tool_call_parser="jamba"), model)


def test_parsers_are_the_frontends_in_token_mode(model: Any) -> None:
    tokens = EngineSettings(model=MODEL, tool_call_parser="nobody", reasoning_parser="nobody")
    assert vllm_parsing.parser_class(tokens, model) is None
