"""The official `openai` and `anthropic` SDKs through the gateway, with the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from harness.gateway import Gateway, fake_gateway

MODEL = "demo-chat"
HELLO: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": MODEL, "max_tokens": 8, "messages": HELLO}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
MESSAGES_TOOLS: Any = [{"name": "get_weather", "description": "Weather", "input_schema": SCHEMA}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with fake_gateway(tmp_path_factory.mktemp("sdks")) as made:
        yield made


@pytest.fixture(scope="module")
def of_openai(served: Gateway) -> Iterator[openai.OpenAI]:
    with served.openai() as client:
        yield client


@pytest.fixture(scope="module")
def of_anthropic(served: Gateway) -> Iterator[anthropic.Anthropic]:
    with served.anthropic() as client:
        yield client


# --- OpenAI ---


def test_openai_lists_models(of_openai: openai.OpenAI) -> None:
    assert [model.id for model in of_openai.models.list()] == [MODEL]
    assert of_openai.models.retrieve(MODEL).id == MODEL


def test_openai_chats(of_openai: openai.OpenAI) -> None:
    found = of_openai.chat.completions.create(**ASK)
    assert found.choices[0].message.content and found.choices[0].finish_reason == "length"
    assert found.usage is not None and found.usage.completion_tokens == 8


def test_openai_stream_has_the_same_text_and_the_usage(of_openai: openai.OpenAI) -> None:
    whole = of_openai.chat.completions.create(**ASK).choices[0].message.content
    chunks = list(
        of_openai.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_openai_completes(of_openai: openai.OpenAI) -> None:
    assert of_openai.completions.create(model=MODEL, prompt="hello", max_tokens=4).choices[0].text


async def test_openai_asks_many_at_once(served: Gateway) -> None:
    async with served.async_openai() as client:
        found = await asyncio.gather(*(client.chat.completions.create(**ASK) for _ in range(20)))
        assert len({one.choices[0].message.content for one in found}) == 1
        stream = await client.chat.completions.create(**ASK, stream=True)
        assert [chunk async for chunk in stream]


def test_openai_takes_tools_and_their_results(of_openai: openai.OpenAI) -> None:
    calls = [
        {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "a"}'},
        }
        for n in range(2)
    ]
    talk: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": call["id"], "content": "rain"} for call in calls),
    ]
    for more in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": False}):
        asked: Any = {**ASK, "messages": talk, "tools": CHAT_TOOLS, **more}
        assert of_openai.chat.completions.create(**asked).choices[0].finish_reason


@pytest.mark.parametrize(
    ("more", "kind", "says"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "not found"),
        ({"temperature": 9}, openai.BadRequestError, "emperature"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "a " * 140_000}]}, openai.BadRequestError, "takes 131072"),
        ({"extra_body": {"nvext": {"router": {}}}}, openai.BadRequestError, "nvext"),
    ],
)
def test_openai_error_is_of_its_class(
    of_openai: openai.OpenAI, more: dict[str, Any], kind: type[openai.APIStatusError], says: str
) -> None:
    with pytest.raises(kind) as raised:
        of_openai.chat.completions.create(**{**ASK, **more})
    assert says in str(raised.value)


def test_openai_key_errors_are_of_their_class(served: Gateway) -> None:
    other_model = served.create_key("other-model-openai", "--model", "other")
    one_a_minute = served.create_key("slow-openai", "--requests-per-minute", "1")
    with (
        served.openai("sk-nobody") as client,
        pytest.raises(openai.AuthenticationError, match="is not known"),
    ):
        client.chat.completions.create(**ASK)
    with (
        served.openai(other_model) as client,
        pytest.raises(openai.PermissionDeniedError, match="may not use"),
    ):
        client.chat.completions.create(**ASK)
    with served.openai(one_a_minute) as client:
        client.chat.completions.create(**ASK)
        with pytest.raises(openai.RateLimitError, match="requests per minute") as raised:
            client.chat.completions.create(**ASK)
    assert raised.value.code == "rate_limit_exceeded" and int(raised.value.response.headers["retry-after"])


# --- Anthropic ---


def test_anthropic_lists_models(of_anthropic: anthropic.Anthropic) -> None:
    (found,) = of_anthropic.models.list()
    assert (found.id, found.type) == (MODEL, "model")
    assert of_anthropic.models.retrieve(MODEL).id == MODEL


def test_anthropic_talks(of_anthropic: anthropic.Anthropic) -> None:
    found = of_anthropic.messages.create(**ASK)
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "max_tokens")
    assert found.content[0].type == "text" and found.content[0].text
    assert found.usage.input_tokens > 0 and found.usage.output_tokens == 8


def texts(message: Any) -> list[str]:
    return [block.text for block in message.content if block.type == "text"]


def test_anthropic_stream_adds_up_to_the_same_message(of_anthropic: anthropic.Anthropic) -> None:
    whole = of_anthropic.messages.create(**ASK)
    with of_anthropic.messages.stream(**ASK) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [said] == texts(whole)
    assert (texts(final), final.stop_reason) == (texts(whole), whole.stop_reason)
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_anthropic_stream_has_its_events_in_order(of_anthropic: anthropic.Anthropic) -> None:
    kinds = [event.type for event in of_anthropic.messages.create(**ASK, stream=True)]
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * (len(kinds) - 5),
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_anthropic_talks_async_and_streams(served: Gateway) -> None:
    async with served.async_anthropic() as client:
        whole = await client.messages.create(**ASK)
        async with client.messages.stream(**ASK) as stream:
            final = await stream.get_final_message()
    assert texts(final) == texts(whole)


def test_anthropic_token_may_be_the_key(served: Gateway) -> None:
    """As ANTHROPIC_AUTH_TOKEN, which goes into another header."""
    with anthropic.Anthropic(base_url=served.url, auth_token=served.key, max_retries=0) as client:
        assert client.messages.create(**ASK).content


def test_anthropic_beta_client_talks(of_anthropic: anthropic.Anthropic) -> None:
    found = of_anthropic.beta.messages.create(**ASK, betas=["context-management-2025-06-27"])
    assert found.content


def test_anthropic_counts_tokens(of_anthropic: anthropic.Anthropic) -> None:
    few = of_anthropic.messages.count_tokens(model=MODEL, messages=HELLO).input_tokens
    with_tools: Any = {"messages": HELLO, "system": "Be short.", "tools": MESSAGES_TOOLS}
    assert 0 < few < of_anthropic.messages.count_tokens(model=MODEL, **with_tools).input_tokens


def test_anthropic_takes_tools_and_their_results(of_anthropic: anthropic.Anthropic) -> None:
    calls = [
        {"type": "tool_use", "id": f"toolu_{n}", "name": "get_weather", "input": {"city": "a"}}
        for n in range(2)
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_0", "content": "rain"},
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such city", "is_error": True},
    ]
    talk: Any = [*HELLO, {"role": "assistant", "content": calls}, {"role": "user", "content": results}]
    for choice in ({"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}):
        asked: Any = {**ASK, "messages": talk, "tools": MESSAGES_TOOLS, "tool_choice": choice}
        assert of_anthropic.messages.create(**asked).content


@pytest.mark.parametrize(
    ("more", "kind", "error_type", "says"),
    [
        ({"model": "nothing"}, anthropic.NotFoundError, "not_found_error", "'nothing' not found"),
        (
            {"extra_body": {"temperature": 9}},
            anthropic.BadRequestError,
            "invalid_request_error",
            "emperature",
        ),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": "a " * 140_000}]},
            anthropic.BadRequestError,
            "invalid_request_error",
            "takes 131072",
        ),
    ],
)
def test_anthropic_error_is_of_its_class(
    of_anthropic: anthropic.Anthropic,
    more: dict[str, Any],
    kind: type[anthropic.APIStatusError],
    error_type: str,
    says: str,
) -> None:
    with pytest.raises(kind) as raised:
        of_anthropic.messages.create(**{**ASK, **more})
    assert_error(raised.value, error_type, says)


def assert_error(error: anthropic.APIStatusError, error_type: str, says: str) -> None:
    body: Any = error.body
    assert (body["type"], body["error"]["type"]) == ("error", error_type)
    assert says in body["error"]["message"] and says in str(error)


def test_anthropic_key_errors_are_of_their_class(served: Gateway) -> None:
    other_model = served.create_key("other-model", "--model", "other")
    chat_only = served.create_key("chat-only", "--endpoint", "chat")
    one_a_minute = served.create_key("slow", "--requests-per-minute", "1")
    with served.anthropic("sk-nobody") as client, pytest.raises(anthropic.AuthenticationError) as unknown:
        client.messages.create(**ASK)
    assert_error(unknown.value, "authentication_error", "is not known")
    for key, says in ((other_model, "may not use"), (chat_only, "may not call /v1/messages")):
        with served.anthropic(key) as client, pytest.raises(anthropic.PermissionDeniedError) as denied:
            client.messages.create(**ASK)
        assert_error(denied.value, "permission_error", says)
    with served.anthropic(one_a_minute) as client:
        client.messages.create(**ASK)
        with pytest.raises(anthropic.RateLimitError) as limited:
            client.messages.create(**ASK)
    assert_error(limited.value, "rate_limit_error", "requests per minute")
    assert int(limited.value.response.headers["retry-after"])


def test_client_without_a_key_is_told_how_to_send_one(served: Gateway) -> None:
    with served.client(key="") as client:
        found = client.post("/v1/messages", json=ASK)
    assert found.status_code == 401 and found.headers["www-authenticate"] == "Bearer"
    assert found.json()["error"]["message"].endswith("send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
