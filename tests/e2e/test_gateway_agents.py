"""Tools and thoughts of a real model through the gateway, with the official SDKs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from harness.gateway import Gateway, gateway

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"name": "get_weather", "description": "Weather of a city", "input_schema": SCHEMA}
FUNCTION = {"name": "get_weather", "description": "Weather of a city", "parameters": SCHEMA}
SUM = "What is 17 + 25?"
WEATHER = "What is the weather in Zurich?"
TWO_CITIES = "What is the weather in Zurich and in Paris?"
NO_SPACES = '{"backend": "xgrammar", "disable_any_whitespace": true}'
"""A small model that must write JSON may write spaces until its tokens are used up."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("agents"), "--structured-outputs-config", NO_SPACES) as made:
        yield made


@pytest.fixture(scope="module")
def of_anthropic(served: Gateway) -> Iterator[anthropic.Anthropic]:
    with served.anthropic() as client:
        yield client


@pytest.fixture(scope="module")
def of_openai(served: Gateway) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


def asked(text: Any, **more: Any) -> Any:
    turns = text if isinstance(text, list) else [{"role": "user", "content": text}]
    body = {"extra_body": {"temperature": 0}, "max_tokens": 150, **more}
    return {"model": "demo-chat", "messages": turns, **body}


def calls(message: Any) -> list[tuple[str, object]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


# --- Messages ---


def test_thoughts_are_a_block_before_the_text(of_anthropic: anthropic.Anthropic) -> None:
    thought, said = of_anthropic.messages.create(**asked(SUM)).content
    assert thought.type == "thinking" and "7+5+0=12" in thought.thinking
    assert said.type == "text" and said.text == "17 + 25 = 42"


def test_streamed_thoughts_and_text_are_blocks_of_their_own(of_anthropic: anthropic.Anthropic) -> None:
    seen = list(of_anthropic.messages.create(**asked(SUM), stream=True))
    opened = [event.content_block.type for event in seen if event.type == "content_block_start"]
    deltas = [(event.index, event.delta.type) for event in seen if event.type == "content_block_delta"]
    assert opened == ["thinking", "text"]
    assert set(deltas) == {(0, "thinking_delta"), (0, "signature_delta"), (1, "text_delta")}
    numbers = [number for number, _ in deltas]
    assert numbers == sorted(numbers), "one block ends before the next begins"


def test_thoughts_can_be_sent_back(of_anthropic: anthropic.Anthropic) -> None:
    """As agents do, with the signature that they got."""
    first = of_anthropic.messages.create(**asked(SUM))
    kept = [block.model_dump(include={"type", "thinking", "signature", "text"}) for block in first.content]
    talk = [
        {"role": "user", "content": SUM},
        {"role": "assistant", "content": kept},
        {"role": "user", "content": "What is 2 + 3?"},
    ]
    assert of_anthropic.messages.create(**asked(talk)).usage.output_tokens > 0


def test_tool_is_called_and_its_result_is_used(of_anthropic: anthropic.Anthropic) -> None:
    found = of_anthropic.messages.create(**asked(WEATHER, tools=[TOOL]))
    assert (calls(found), found.stop_reason) == ([("get_weather", {"city": "Zurich"})], "tool_use")
    (use,) = [block for block in found.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"sky": "rain", "degrees": 7}'}
    talk = [
        {"role": "user", "content": WEATHER},
        {"role": "assistant", "content": [use.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [result]},
    ]
    (said,) = of_anthropic.messages.create(**asked(talk, tools=[TOOL])).content
    assert said.type == "text" and "Zurich" in said.text and "7" in said.text


def test_streamed_call_has_its_input_in_parts_of_json(of_anthropic: anthropic.Anthropic) -> None:
    with of_anthropic.messages.stream(**asked(WEATHER, tools=[TOOL])) as stream:
        kinds = {event.delta.type for event in stream if event.type == "content_block_delta"}
        final = stream.get_final_message()
    assert kinds == {"input_json_delta"}
    assert (calls(final), final.stop_reason) == ([("get_weather", {"city": "Zurich"})], "tool_use")


@pytest.mark.parametrize("streams", [False, True])
def test_two_tools_are_called_at_once(of_anthropic: anthropic.Anthropic, streams: bool) -> None:
    body = asked(TWO_CITIES, tools=[TOOL])
    if streams:
        with of_anthropic.messages.stream(**body) as stream:
            found: Any = stream.get_final_message()
    else:
        found = of_anthropic.messages.create(**body)
    assert calls(found) == [("get_weather", {"city": city}) for city in ("Zurich", "Paris")]
    assert len({block.id for block in found.content if block.type == "tool_use"}) == 2


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
def test_call_that_the_client_insists_on_is_made(of_anthropic: anthropic.Anthropic, choice: Any) -> None:
    found = of_anthropic.messages.create(**asked("Good morning!", tools=[TOOL], tool_choice=choice))
    assert {name for name, _ in calls(found)} == {"get_weather"}


def test_tool_that_the_client_forbids_is_not_called(of_anthropic: anthropic.Anthropic) -> None:
    found = of_anthropic.messages.create(**asked(WEATHER, tools=[TOOL], tool_choice={"type": "none"}))
    assert (calls(found), found.stop_reason) == ([], "end_turn")


def test_stop_sequence_is_named(of_anthropic: anthropic.Anthropic) -> None:
    found = of_anthropic.messages.create(**asked("Good morning!", stop_sequences=["How"]))
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", "How")


# --- Chat completions ---


def chat(client: openai.OpenAI, text: str, **more: Any) -> Any:
    tools = [{"type": "function", "function": FUNCTION}]
    create: Any = client.chat.completions.create
    return create(**asked(text, tools=tools, **more))


def test_openai_calls_two_tools_at_once(of_openai: openai.OpenAI) -> None:
    choice = chat(of_openai, TWO_CITIES).choices[0]
    found = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
    assert (found, choice.finish_reason) == (["Zurich", "Paris"], "tool_calls")


def test_openai_streams_two_calls(of_openai: openai.OpenAI) -> None:
    arguments = {0: "", 1: ""}
    for chunk in chat(of_openai, TWO_CITIES, stream=True):
        for call in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            arguments[call.index] += call.function.arguments or ""
    assert [json.loads(text)["city"] for text in arguments.values()] == ["Zurich", "Paris"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_openai_call_that_the_client_insists_on_is_made(of_openai: openai.OpenAI, choice: Any) -> None:
    for call in chat(of_openai, "Good morning!", tool_choice=choice).choices[0].message.tool_calls:
        assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)


# --- Responses, which the frontend has on its own port ---


def test_responses_call_a_tool_and_use_its_result(served: Gateway) -> None:
    tools: Any = [{"type": "function", **FUNCTION, "strict": False}]
    with served.openai(base_url=f"{served.frontend_url}/v1") as client:
        create: Any = client.responses.create
        common = {
            "model": "demo-chat",
            "tools": tools,
            "temperature": 0,
            "max_output_tokens": 150,
            "store": False,
        }
        (call,) = create(**common, input=WEATHER).output
        assert (call.type, json.loads(call.arguments)) == ("function_call", {"city": "Zurich"})
        history = [
            {"role": "user", "content": WEATHER},
            call.model_dump(include={"type", "name", "arguments", "call_id"}),
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": '{"sky": "rain", "degrees": 7}',
            },
        ]
        said = create(**common, input=history).output_text
        assert "Zurich" in said and "7" in said
        with client.responses.stream(**common, input=WEATHER) as stream:
            kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds
