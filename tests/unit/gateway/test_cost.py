"""What a client writes can neither lower a counter nor raise it without limit, on any path."""

from __future__ import annotations

import json

import pytest

from dynamo_vllm.gateway import cost
from dynamo_vllm.gateway.cost import DEFAULT_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS, Size
from dynamo_vllm.gateway.envoy.routes import ROUTES
from dynamo_vllm.gateway.replies import GatewayError

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
COUNTS = (*LIMITS, "n", "best_of")
ODD = ("-1", str(-(10**12)), "-1e300", "1e300", "1e999", str(10**30), "9" * 5000, "9e18", "0", "0.5", "-0.0")
NOT_NUMBERS = ("null", "true", '"7"', '"many"', "[1,2]", "{}", "[" * 500 + "]" * 500)
PATHS = tuple(route.path for route in ROUTES)


@pytest.mark.parametrize("number", [*ODD, *NOT_NUMBERS])
def test_every_number_of_every_path_costs_between_nothing_and_the_most(number: str) -> None:
    for path in PATHS:
        for name in COUNTS:
            body = f'{{"model": "m", "{name}": {number}}}'.encode()
            assert 0 <= cost.of_body(path, body) <= MOST_TOKENS, (path, name)
        assert 0 <= cost.worst_case(path, Size(300, (number,), (number,))) <= MOST_TOKENS, path
        assert 0 <= cost.worst_case(path, Size(-5, (None,), (None,), prompts=-3)) <= MOST_TOKENS, path


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({}, DEFAULT_TOKENS),
        ({"max_tokens": 50}, 50),
        ({"max_tokens": 50.0}, 50),
        ({"max_tokens": 0}, DEFAULT_TOKENS),
        ({"max_tokens": -(10**12)}, DEFAULT_TOKENS),
        ({"max_tokens": "50"}, DEFAULT_TOKENS),
        ({"max_tokens": 3000, "max_output_tokens": 1}, 3000),
        ({"max_tokens": 1, "max_output_tokens": 3000}, 3000),
        ({"max_tokens": 2000, "n": 8}, 16000),
        ({"max_tokens": 2000, "n": -8}, 2000),
        ({"max_tokens": 10, "n": 2, "best_of": 5}, 50),
        ({"max_tokens": 10**12}, MOST_TOKENS),
    ],
)
@pytest.mark.parametrize("path", [CHAT, RESPONSES, "/v1/messages"])
def test_the_answer_costs_the_largest_limit_for_each_answer(
    fields: dict[str, object], tokens: int, path: str
) -> None:
    body = json.dumps(fields).encode()
    assert cost.of_body(path, body) == min(tokens + len(body) // 3, MOST_TOKENS)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a text", 1),
        ('a "quoted" text', 1),
        (["one"], 1),
        (["one", "two, with a comma"], 2),
        (["x"] * 20, 20),
        ([1, 2, 3], 1),
        ([[1, 2], [3]], 2),
        ([], 1),
        (None, 1),
    ],
)
def test_every_prompt_of_a_list_has_an_answer(prompt: object, prompts: int) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 1000}).encode()
    assert cost.of_body(COMPLETIONS, body) == 1000 * prompts + len(body) // 3


def test_prompts_are_never_fewer_than_there_are() -> None:
    assert cost.prompts_in(rb'["ends with a backslash\\","b\\","c"]') >= 3
    assert cost.prompts_in(b' [ "a" , "b" ] ') == 2
    assert cost.prompts_in(b"[" + b'"",' * 1_000_000 + b'""]') == 1_000_001


def test_the_bytes_of_an_image_are_not_its_tokens_but_those_of_texts_are() -> None:
    assert cost.worst_case(CHAT, Size(10**8, ("1",))) == MOST_PROMPT_TOKENS + 1
    assert cost.worst_case("/v1/embeddings", Size(3 * 10**6)) == 10**6
    assert cost.worst_case("/v1/embeddings", Size(10**8, has_messages=True)) == MOST_PROMPT_TOKENS
    assert cost.worst_case("/v2/rerank", Size(3000, ("9",))) == 1000


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"x"', b'{"n":' + b"[" * 200_000])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        cost.of_body(CHAT, body)
    assert refused.value.status == 400
