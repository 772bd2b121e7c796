"""Tests vLLM's parsers behind ours, with the demo model's tokenizer and no weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.tokenizers import get_tokenizer

from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.parts import parsing as vllm_parsing
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


def parsing(model: Any, wishes: dict[str, Any] | None = None, **body: Any) -> vllm_parsing.Parsing:
    found = vllm_parsing.parser_class(settings(tool_call_parser="hermes", reasoning_parser="qwen3"), model)
    asked = ChatBody(messages=[{"role": "user", "content": "weather?"}], **body)
    return vllm_parsing.Parsing(found, get_tokenizer(MODEL), model, asked, wishes or {})


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


def test_parsers_are_the_frontends_in_token_mode(model: Any) -> None:
    tokens = EngineSettings(model=MODEL, tool_call_parser="nobody", reasoning_parser="nobody")
    assert vllm_parsing.parser_class(tokens, model) is None
