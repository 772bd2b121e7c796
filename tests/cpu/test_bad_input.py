"""Tests bad input over HTTP: a 4xx that names the field, and the engine continues."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from harness.stack import Stack

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}


def completion(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 4, **more}


PATTERNS = {"type": "object", "properties": {"a": {}}, "patternProperties": {"^x": {"type": "string"}}}
SCHEMA_OF_NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
CASES: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("unknown model", CHAT, chat(model="nobody"), 404, "model"),
    ("no messages", CHAT, chat(messages=[]), 400, "messages"),
    ("prompt longer than the context", COMPLETIONS, completion(prompt=[20] * 3000), 400, "prompt"),
    ("max_tokens 0", CHAT, chat(max_tokens=0), 400, "max tokens"),
    ("max_tokens negative", CHAT, chat(max_tokens=-1), 400, "-1"),
    ("temperature -1", CHAT, chat(temperature=-1), 400, "temperature"),
    ("n 0", CHAT, chat(n=0), 400, "n must"),
    ("logprobs 50", COMPLETIONS, completion(logprobs=50), 400, "logprobs"),
    ("top_logprobs 50", CHAT, chat(logprobs=True, top_logprobs=50), 400, "top_logprobs"),
    ("five stop strings", CHAT, chat(stop=list("abcde")), 400, "stop"),
    ("an empty stop string", CHAT, chat(stop=[""]), 400, "stop"),
    ("stop token out of vocabulary", CHAT, chat(stop_token_ids=[99999]), 400, "stop_token_ids"),
    ("invalid JSON schema", CHAT, chat(response_format=SCHEMA_OF_NONSENSE), 400, "guided_json"),
    ("schema for outlines alone", CHAT, chat(guided_json=PATTERNS), 400, "patternproperties"),
    ("invalid regex", CHAT, chat(guided_regex="["), 400, "guided_regex"),
    ("invalid grammar", CHAT, chat(guided_grammar="root ::= nowhere"), 400, "guided_grammar"),
    ("unclosed grammar", CHAT, chat(guided_grammar="root ::= ("), 400, "guided_grammar"),
    ("two constraints", CHAT, chat(guided_regex="a", guided_choice=["a"]), 400, "guided"),
    ("best_of", COMPLETIONS, completion(best_of=3), 400, "best_of"),
    ("a picture", CHAT, chat(messages=[{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}]}]), 400, "messages"),
    ("wrong type", CHAT, chat(temperature="hot"), 400, "hot"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def engine_goes_on(one_worker: Stack) -> Iterator[None]:
    """Checks after every case that the same worker answers a good request."""
    yield
    answer = one_worker.post(COMPLETIONS, completion(prompt=[30, 31], temperature=0))
    assert answer.status_code == 200, answer.text
    assert one_worker.workers[0].process.poll() is None
    assert one_worker.workers[0].busy() == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "named"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_refused_streamed_or_not(
    one_worker: Stack, path: str, body: dict[str, Any], status: int, named: str
) -> None:
    for stream in (False, True):
        answer = one_worker.post(path, {**body, "stream": stream})
        assert answer.status_code == status, answer.text
        assert named in answer.json()["message"].lower()


def test_token_ids_out_of_vocabulary(one_worker: Stack) -> None:
    """The frontend refuses ids that its tokenizer does not have, with its own message."""
    for ids in ([5, 99999], [2**31]):
        assert one_worker.post(COMPLETIONS, completion(prompt=ids)).status_code == 400


def test_same_request_id_header_twice_at_once(one_worker: Stack) -> None:
    """Both get their own answer. The frontend creates its own ids; a unit test covers the worker's check."""
    headers = {"x-request-id": "11111111-1111-4111-8111-111111111111"}

    def ask(first: int) -> str:
        body = completion(prompt=[first, 31], temperature=0, max_tokens=40)
        return str(one_worker.post(COMPLETIONS, body, headers=headers).json()["choices"][0]["text"])

    alone = [ask(first) for first in (30, 50)]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (30, 50))) == alone


def test_a_clients_rank_does_not_stand_against_the_routers(one_worker: Stack) -> None:
    """The KV router sets the rank itself; the worker's check is tested on the request plane."""
    plain = one_worker.post(CHAT, chat(temperature=0)).json()["choices"]
    answer = one_worker.post(CHAT, chat(temperature=0, nvext={"dp_rank": 7}))
    assert answer.status_code == 200
    assert answer.json()["choices"] == plain
