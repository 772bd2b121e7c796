"""What a client writes can neither lower a counter nor raise it without limit, on any path."""

from __future__ import annotations

import json

import pytest

from dynamo_vllm.gateway import cost
from dynamo_vllm.gateway.cost import DEFAULT_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS, Size
from dynamo_vllm.gateway.envoy.routes import ROUTES
from harness.refusals import refused

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
COUNTS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of")
ODD = ("-1", str(-(10**12)), "-1e300", "1e300", "1e999", str(10**30), "9" * 5000, "9e18", "0", "0.5", "-0.0")
NOT_NUMBERS = ("null", "true", '"7"', '"many"', "[1,2]", "{}", "[" * 500 + "]" * 500)


def test_every_number_of_every_path_costs_between_nothing_and_the_most() -> None:
    for path in {route.path for route in ROUTES}:
        assert 0 <= cost.worst_case(path, Size(-5, (None,), (None,), prompts=-3)) <= MOST_TOKENS, path
        for number in (*ODD, *NOT_NUMBERS):
            assert 0 <= cost.worst_case(path, Size(300, (number,), (number,))) <= MOST_TOKENS, (path, number)
            for name in COUNTS:
                body = f'{{"model": "m", "{name}": {number}}}'.encode()
                assert 0 <= cost.of_body(path, body) <= MOST_TOKENS, (path, name, number)


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
def test_the_answer_costs_the_largest_limit_for_each_answer(fields: dict[str, object], tokens: int) -> None:
    body = json.dumps(fields).encode()
    for path in (CHAT, RESPONSES, "/v1/messages"):
        assert cost.of_body(path, body) == min(tokens + len(body) // 3, MOST_TOKENS)


def test_every_prompt_of_a_list_has_an_answer() -> None:
    prompts = {
        1: ("a text", 'a "quoted" text', ["one"], [1, 2, 3], [], None),
        2: (["one", "two, with a comma"], [[1, 2], [3]]),
        20: (["x"] * 20,),
    }
    for count, values in prompts.items():
        for prompt in values:
            body = json.dumps({"prompt": prompt, "max_tokens": 1000}).encode()
            assert cost.of_body(COMPLETIONS, body) == 1000 * count + len(body) // 3, prompt


def test_prompts_are_never_fewer_than_there_are() -> None:
    assert cost.prompts_in(rb'["ends with a backslash\\","b\\","c"]') >= 3
    assert cost.prompts_in(b' [ "a" , "b" ] ') == 2
    assert cost.prompts_in(b"[" + b'"",' * 1_000_000 + b'""]') == 1_000_001


def test_the_bytes_of_an_image_are_not_its_tokens_but_those_of_texts_are() -> None:
    assert cost.worst_case(CHAT, Size(10**8, ("1",))) == MOST_PROMPT_TOKENS + 1
    assert cost.worst_case("/v1/embeddings", Size(3 * 10**6)) == 10**6
    assert cost.worst_case("/v1/embeddings", Size(10**8, has_messages=True)) == MOST_PROMPT_TOKENS
    assert cost.worst_case("/v2/rerank", Size(3000, ("9",))) == 1000


def test_a_body_that_is_no_object_is_refused() -> None:
    for body in (b"", b"[]", b"{", b'"x"', b'{"n":' + b"[" * 200_000):
        with refused(400):
            cost.of_body(CHAT, body)
