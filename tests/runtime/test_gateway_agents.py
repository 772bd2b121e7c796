"""Requests of coding agents, chat front ends and libraries are answered, or refused with clear words."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import agent_requests as agents
from harness.agent_requests import CHAT, COUNT, MESSAGES, RESPONSES, AgentRequest
from harness.gateway import Gateway, fake_gateway

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with fake_gateway(tmp_path_factory.mktemp("agents")) as made:
        yield made


def send(served: Gateway, request: AgentRequest) -> httpx.Response:
    """Responses go to the frontend itself: the gateway has no route for them."""
    where = served.frontend_url if request.path == RESPONSES else ""
    return served.http.post(where + request.path, json=request.body, headers=request.headers)


@pytest.mark.parametrize("request_", agents.all_requests(), ids=str)
def test_request_is_answered_or_refused_clearly(served: Gateway, request_: AgentRequest) -> None:
    found = send(served, request_)
    assert found.status_code == request_.status, found.text
    if found.status_code != 200:
        assert request_.says in message_of(found.json())
    elif request_.body.get("stream"):
        assert_complete(request_.path, events(found.text))
    else:
        assert_answer(request_.path, found.json())


def message_of(body: Any) -> str:
    text: str = body.get("error", body)["message"]
    return text


def assert_answer(path: str, body: Any) -> None:
    if path == COUNT:
        assert body["input_tokens"] > 0
    elif path == MESSAGES:
        assert body["content"] and body["usage"]["output_tokens"] > 0
    elif path == RESPONSES:
        assert body["status"] in ("completed", "incomplete") and body["usage"]["output_tokens"] > 0
    else:
        assert body["choices"][0]["finish_reason"] and body["usage"]["completion_tokens"] > 0


def events(text: str) -> list[tuple[str, Any]]:
    """Names and data of a stream; what is no JSON stays a text."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        data = lines.get("data", "")
        found.append((lines.get("event", ""), json.loads(data) if data.startswith("{") else data))
    return found


def assert_complete(path: str, found: list[tuple[str, Any]]) -> None:
    if path == CHAT:
        assert found[-1] == ("", "[DONE]")
        assert any(data["choices"] and data["choices"][0]["finish_reason"] for _, data in found[:-1])
        return
    names = [name for name, _ in found if name]
    assert all(data["type"] == name for name, data in found if name)
    if path == RESPONSES:
        assert names[:2] == ["response.created", "response.in_progress"]
        assert names[-1] in ("response.completed", "response.incomplete")
        numbers = [data["sequence_number"] for name, data in found if name]
        assert numbers == sorted(set(numbers))
        return
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[2:-3]) <= {"content_block_start", "content_block_delta", "content_block_stop", "ping"}
    (last,) = [data for name, data in found if name == "message_delta"]
    assert last["delta"]["stop_reason"] and last["usage"]["output_tokens"] > 0


def test_line_about_the_client_does_not_change_the_prompt(served: Gateway) -> None:
    """A coding agent begins its system prompt with it, in each session another; no prefix would match."""
    used = []
    for session in ("0", "0123456789abcdef" * 5):
        line = f"x-anthropic-billing-header: cc_version=2.1.0.{session}; cc_entrypoint=cli; cch={session};"
        body = agents.messages(system=[agents.text(line), agents.text("You are an agent.")])
        used.append(served.http.post(MESSAGES, json=body).json()["usage"]["input_tokens"])
    assert used[0] == used[1]


def test_counted_tokens_are_an_estimate(served: Gateway) -> None:
    """The frontend divides characters by three, and does not tokenize."""
    body = agents.messages(agents.user(agents.words(3000)))
    counted = served.http.post(COUNT, json=body).json()["input_tokens"]
    used = served.http.post(MESSAGES, json=body).json()["usage"]["input_tokens"]
    assert used / 3 < counted < used * 3


def test_unknown_path_is_named(served: Gateway) -> None:
    found = served.http.post("/v1/message", json={})
    assert (found.status_code, message_of(found.json())) == (404, "there is no POST /v1/message")


def test_model_that_sees_gets_pictures(tmp_path: Path) -> None:
    media: Any = {"context_length": 4096, "vocab_size": 4000, "media": {"image": 4}}
    with fake_gateway(tmp_path, "--demo", "vision", **media) as served:
        pictures = [request for request in agents.all_requests() if "picture" in request.name]
        assert len(pictures) == 5
        for request in pictures:
            body = {**request.body, "model": "demo-vision"}
            found = send(served, AgentRequest(request.name, request.path, body))
            assert found.status_code == 200, (request.name, found.text)


def test_unknown_fields_are_dropped_and_quiet_streams_kept_alive_on_request(tmp_path: Path) -> None:
    words = ("--ignore-unknown-fields", "--keep-alive-ms", "50", "--error-wait-ms", "0")
    with fake_gateway(tmp_path, *words, prefill_ms=500) as served:
        unknown = [request for request in agents.chat_requests() if request.says == agents.UNKNOWN]
        assert len(unknown) > 1
        for request in unknown:
            assert send(served, request).status_code == 200, request.name
        for path in (MESSAGES, CHAT):
            found = served.http.post(path, json=agents.chat(stream=True)).text
            assert "\n:\n" in f"\n{found}", "a comment"
