"""The official `openai` and `anthropic` SDKs through the gateway, with the fake engine.

Tools and thoughts of a real model are in tests/e2e/test_gateway_agents.py, what agents send besides in
test_gateway_agents.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from harness.gateway import Gateway, fake_gateway

MODEL = "demo-chat"
HELLO: Any = [{"role": "user", "content": "hello"}]
ASK: Any = {"model": MODEL, "max_tokens": 8, "messages": HELLO}


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


def test_openai_lists_models_and_completes(of_openai: openai.OpenAI) -> None:
    assert [model.id for model in of_openai.models.list()] == [MODEL]
    assert of_openai.models.retrieve(MODEL).id == MODEL
    assert of_openai.completions.create(model=MODEL, prompt="hello", max_tokens=4).choices[0].text


def test_openai_stream_has_the_text_of_a_chat_and_the_usage(of_openai: openai.OpenAI) -> None:
    whole = of_openai.chat.completions.create(**ASK)
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == 8
    chunks = list(
        of_openai.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True})
    )
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 8


def test_openai_errors_are_of_their_class(served: Gateway) -> None:
    def ask(key: str, **more: Any) -> None:
        with served.openai(key) as client:
            client.chat.completions.create(**ASK | more)

    with pytest.raises(openai.NotFoundError, match="not found"):
        ask(served.key, model="nothing")
    with pytest.raises(openai.BadRequestError, match="emperature"):
        ask(served.key, temperature=9)
    with pytest.raises(openai.AuthenticationError, match="is not known"):
        ask("sk-nobody")
    with pytest.raises(openai.PermissionDeniedError, match="may not use"):
        ask(served.create_key("other-model-openai", "--model", "other"))
    one_a_minute = served.create_key("slow-openai", "--requests-per-minute", "1")
    ask(one_a_minute)
    with pytest.raises(openai.RateLimitError, match="requests per minute") as raised:
        ask(one_a_minute)
    assert raised.value.code == "rate_limit_exceeded" and int(raised.value.response.headers["retry-after"])


# --- Anthropic ---


def test_anthropic_lists_models_and_talks(served: Gateway, of_anthropic: anthropic.Anthropic) -> None:
    (model,) = of_anthropic.models.list()
    assert (model.id, model.type) == (MODEL, "model")
    assert of_anthropic.models.retrieve(MODEL).id == MODEL
    found = of_anthropic.messages.create(**ASK)
    assert (found.type, found.role, found.stop_reason) == ("message", "assistant", "max_tokens")
    assert found.usage.input_tokens > 0 and found.usage.output_tokens == 8
    # As ANTHROPIC_AUTH_TOKEN, which goes into another header.
    with anthropic.Anthropic(base_url=served.url, auth_token=served.key, max_retries=0) as client:
        assert client.messages.create(**ASK).content


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


def assert_error(error: anthropic.APIStatusError, error_type: str, says: str) -> None:
    body: Any = error.body
    assert (body["type"], body["error"]["type"]) == ("error", error_type)
    assert says in body["error"]["message"] and says in str(error)


def test_anthropic_errors_are_of_their_class(served: Gateway, of_anthropic: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as not_found:
        of_anthropic.messages.create(**ASK | {"model": "nothing"})
    assert_error(not_found.value, "not_found_error", "'nothing' not found")
    with pytest.raises(anthropic.BadRequestError) as bad_request:
        of_anthropic.messages.create(**ASK | {"messages": []})
    assert_error(bad_request.value, "invalid_request_error", "messages")
    one_a_minute = served.create_key("slow", "--requests-per-minute", "1")
    with served.anthropic(one_a_minute) as client:
        client.messages.create(**ASK)
    for key, kind, error_type, says in (
        ("sk-nobody", anthropic.AuthenticationError, "authentication_error", "is not known"),
        (
            served.create_key("chat-only", "--endpoint", "chat"),
            anthropic.PermissionDeniedError,
            "permission_error",
            "may not call /v1/messages",
        ),
        (one_a_minute, anthropic.RateLimitError, "rate_limit_error", "requests per minute"),
    ):
        with served.anthropic(key) as client, pytest.raises(kind) as raised:
            client.messages.create(**ASK)
        assert_error(raised.value, error_type, says)
    assert int(raised.value.response.headers["retry-after"])
