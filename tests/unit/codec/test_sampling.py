"""From a request's options to a SamplingSpec: what is refused, what is filled in, what is mended."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from dynamo_vllm import wire, wire_openai
from dynamo_vllm.codec import prompt, sampling
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import EngineFacts, Guide, SamplingSpec

FACTS = facts_of(FakeSpec(context_length=4096, vocab_size=1000))


def tokens(room: int = 100, facts: EngineFacts = FACTS, **sections: Any) -> SamplingSpec:
    return sampling.from_tokens(wire.parse({"token_ids": [1], **sections}), room, facts)


def text(room: int = 100, **fields: Any) -> SamplingSpec:
    return sampling.from_text(wire_openai.parse({"prompt": "a", **fields}), room, FACTS)


def chat(room: int = 100, **fields: Any) -> SamplingSpec:
    return sampling.from_text(wire_openai.parse({"messages": [{}], **fields}), room, FACTS)


def test_bare_request_gets_the_engines_defaults_and_all_the_room() -> None:
    assert tokens(room=70) == SamplingSpec(max_tokens=70)


OUT_OF_RANGE: dict[str, dict[str, list[Any]]] = {
    "stop_conditions": {
        "max_tokens": [0, -5],
        "min_tokens": [-1],
        "stop": [["a", "b", "c", "d", "e"], ["a", ""], ["a" * 1025]],
        "stop_token_ids": [[*range(257)], [1000], [-1]],
        "max_thinking_tokens": [-1],
    },
    "sampling_options": {
        "temperature": [-1.0, 2.1, math.nan, math.inf],
        "top_p": [0.0, 1.1, math.nan],
        "top_k": [-2],
        "min_p": [-0.1, 1.5],
        "presence_penalty": [2.5],
        "frequency_penalty": [-2.5],
        "repetition_penalty": [0.0, math.nan],
        "n": [0, -1, 129],
        "best_of": [2],
        "use_beam_search": [True],
        "length_penalty": [0.5],
        "seed": [2**63, -(2**63) - 1],
        "logit_bias": [{1000: 1.0}, dict.fromkeys(range(513), 1.0), {1: 101.0}, {1: math.nan}],
    },
    "output_options": {"logprobs": [50, -1], "prompt_logprobs": [21]},
}


def test_value_out_of_range_is_refused_by_the_name_of_its_field() -> None:
    for section, fields in OUT_OF_RANGE.items():
        for field, values in fields.items():
            for value in values:
                with pytest.raises(InvalidRequest) as refusal:
                    tokens(**{section: {field: value}})  # type: ignore[arg-type]
                assert refusal.value.parameter == field
                assert field in str(refusal.value)


@pytest.mark.parametrize(
    ("section", "field", "value", "expected"),
    [
        ("stop_conditions", "max_tokens", 1, {"max_tokens": 1}),
        ("stop_conditions", "max_tokens", 500, {}),  # cut to the room
        ("stop_conditions", "ignore_eos", True, {"ignore_eos": True}),
        ("stop_conditions", "stop", ["a", "b", "c", "d"], {}),
        ("stop_conditions", "stop_token_ids", [0, 999], {"stop_token_ids": (0, 999)}),
        ("stop_conditions", "max_thinking_tokens", 0, {"max_thinking_tokens": 0}),
        ("sampling_options", "temperature", 0.0, {"temperature": 0.0}),
        ("sampling_options", "temperature", 2.0, {"temperature": 2.0}),
        ("sampling_options", "top_k", -1, {"top_k": -1}),
        ("sampling_options", "top_k", 50, {"top_k": 50}),
        ("sampling_options", "n", 128, {"n": 128}),
        ("sampling_options", "best_of", 1, {}),
        ("sampling_options", "length_penalty", 1.0, {}),
        ("sampling_options", "seed", -(2**63), {"seed": -(2**63)}),
        ("sampling_options", "logit_bias", {0: -100.0}, {"logit_bias": {0: -100.0}}),
        ("sampling_options", "include_stop_str_in_output", True, {"include_stop_in_output": True}),
        ("output_options", "logprobs", 20, {"logprobs": 20}),
        ("output_options", "logprobs", 0, {"logprobs": 0}),
        ("output_options", "prompt_logprobs", 1, {"prompt_logprobs": 1}),
        ("output_options", "skip_special_tokens", False, {"skip_special_tokens": False}),
    ],
)
def test_value_at_the_edge_of_its_range_arrives(
    section: str, field: str, value: object, expected: dict[str, Any]
) -> None:
    given: Any = {section: {field: value}}
    assert tokens(**given) == dataclasses.replace(SamplingSpec(max_tokens=100), **expected)


def test_min_tokens_never_exceed_max_tokens() -> None:
    """A request that moved keeps its first min_tokens while max_tokens has shrunk."""
    spec = tokens(stop_conditions={"max_tokens": 5, "min_tokens": 50})
    assert (spec.min_tokens, spec.max_tokens) == (5, 5)


def test_stop_ids_of_all_kinds_are_merged_and_hidden_ones_go_with_an_ignored_eos() -> None:
    stop = {"stop_token_ids": [5, 6], "stop_token_ids_visible": [6, 7], "stop_token_ids_hidden": [2]}
    assert tokens(stop_conditions=stop).stop_token_ids == (5, 6, 7, 2)
    assert tokens(stop_conditions={**stop, "ignore_eos": True}).stop_token_ids == (5, 6, 7)


def test_float_that_went_through_32_bits_is_the_clients_again() -> None:
    arrived = [0.8999999761581421, 0.699999988079071, 1.100000023841858, 0.30000001192092896, 0.123456791043]
    assert [*map(sampling.shortest_float, arrived)] == [0.9, 0.7, 1.1, 0.3, 0.12345679]
    for exact in (1.0, 0.0, -1.5, None, math.inf, 1e300):
        assert sampling.shortest_float(exact) == exact
    assert math.isnan(sampling.shortest_float(math.nan) or 0)
    options = {"temperature": 0.8999999761581421, "presence_penalty": 0.10000000149011612}
    spec = tokens(sampling_options=options)
    assert (spec.temperature, spec.presence_penalty) == (0.9, 0.1)


def test_models_own_defaults_fill_what_the_request_leaves_out() -> None:
    """vLLM reads penalties from a model's generation config since 0.31."""
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    defaults = {"temperature": 0.6, "top_k": 20, "unknown": 1.0, **penalties}
    facts = dataclasses.replace(FACTS, sampling_defaults=defaults)
    spec = tokens(facts=facts, sampling_options={"top_k": 5, "presence_penalty": 0.0})
    assert (spec.temperature, spec.top_k) == (0.6, 5)
    assert (spec.presence_penalty, spec.frequency_penalty) == (0.0, 0.5)


@pytest.mark.parametrize(
    ("guided", "expected"),
    [
        (None, None),
        ({}, None),
        ({"json": {"type": "object"}}, Guide(json={"type": "object"})),
        ({"json": '{"type": "object"}'}, Guide(json='{"type": "object"}')),
        ({"json": True}, Guide(json_object=True)),
        ({"json": {}}, Guide(json_object=True)),
        ({"json": "{}"}, Guide(json_object=True)),
        ({"json": False}, None),
        ({"regex": "a+"}, Guide(regex="a+")),
        ({"choice": ["a", "b"]}, Guide(choice=["a", "b"])),
        ({"grammar": "root ::= 'a'"}, Guide(grammar="root ::= 'a'")),
        ({"structural_tag": {"a": 1}}, Guide(structural_tag='{"a": 1}')),
        ({"structural_tag": "tag"}, Guide(structural_tag="tag")),
        ({"regex": "a", "whitespace_pattern": " "}, Guide(regex="a", whitespace_pattern=" ")),
        ({"whitespace_pattern": " "}, None),
    ],
)
def test_guided_decoding_becomes_one_constraint(
    guided: dict[str, Any] | None, expected: Guide | None
) -> None:
    assert tokens(sampling_options={"guided_decoding": guided}).guide == expected


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be combined"),
        ({"json": True, "grammar": "g"}, "json_object and grammar cannot be combined"),
        ({"choice": []}, "non-empty strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
        ({"json": nested(100)}, "response_format: nested"),
        ({"json": json.dumps(nested(100))}, "response_format: nested"),
        ({"json": "[" * 100_000}, "response_format: nested"),
        ({"structural_tag": {"structures": [{"schema": nested(100)}]}}, "guided_structural_tag: nested"),
        ({"json": {"enum": ["a" * 600_000]}}, "response_format: has 600014 characters"),
        ({"regex": "a" * 600_000}, "guided_regex: has 600000 characters"),
        ({"choice": ["a" * 300_000, "b" * 300_000]}, "guided_choice: has 600000 characters"),
    ],
)
def test_constraints_that_contradict_or_would_hold_the_worker_up_are_refused(
    guided: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokens(sampling_options={"guided_decoding": guided})
    assert tokens(sampling_options={"guided_decoding": {"json": nested(40)}}).guide is not None


# --- text mode --------------------------------------------------------------------------------------------


def test_max_tokens_of_text_mode() -> None:
    """OpenAI's default for completions is 16; a chat has all the room, and its newer name wins."""
    assert (text().max_tokens, text(max_tokens=None, room=7).max_tokens) == (16, 7)
    assert (chat().max_tokens, chat(max_tokens=5, max_completion_tokens=6).max_tokens) == (100, 6)


def test_text_mode_leaves_up_to_four_stop_strings_to_the_engine() -> None:
    spec = text(stop="end", max_tokens=3)
    assert (spec.stop, spec.detokenize) == (["end"], True)
    with pytest.raises(InvalidRequest, match="at most 4"):
        text(stop=["a", "b", "c", "d", "e"])


def test_chat_logprobs_need_the_switch() -> None:
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat(logprobs=True).logprobs == 0
    assert chat(top_logprobs=3).logprobs is None


def test_logit_bias_of_text_mode_has_token_ids_as_keys() -> None:
    assert text(logit_bias={"7": 1.5}).logit_bias == {7: 1.5}
    with pytest.raises(InvalidRequest, match="keys must be token ids"):
        text(logit_bias={"seven": 1.5})


OBJECT = {"type": "object"}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": OBJECT}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(json_object=True)),
        ({"response_format": SCHEMA}, Guide(json=OBJECT)),
        ({"guided_json": OBJECT}, Guide(json=OBJECT)),
        ({"guided_regex": "a+"}, Guide(regex="a+")),
        ({"guided_choice": ["a"]}, Guide(choice=["a"])),
        (
            {"guided_grammar": "g", "guided_whitespace_pattern": " "},
            Guide(grammar="g", whitespace_pattern=" "),
        ),
    ],
)
def test_response_format_and_guided_fields_become_one_constraint(
    fields: dict[str, Any], expected: Guide | None
) -> None:
    assert chat(**fields).guide == expected


@pytest.mark.parametrize(
    "parts",
    [
        {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}},
        {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]},
    ],
)
def test_structural_tag_keeps_its_parts(parts: dict[str, Any]) -> None:
    chosen = {"type": "structural_tag", **parts}
    guide = chat(response_format=chosen).guide
    assert guide is not None
    assert json.loads(guide.structural_tag or "") == chosen


def test_unknown_or_incomplete_response_format_is_refused() -> None:
    for chosen in (
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "triggers": ["<a>"]},
    ):
        with pytest.raises(InvalidRequest) as refusal:
            chat(response_format=chosen)
        assert refusal.value.parameter == "response_format"


# --- the prompt -------------------------------------------------------------------------------------------


def test_room_is_what_fits_behind_the_prompt() -> None:
    assert prompt.room_after([1] * 4095, 4096) == 1
    with pytest.raises(TooLong, match="prompt has 4096 tokens; this model takes 4096"):
        prompt.room_after([1] * 4096, 4096)
    with pytest.raises(InvalidRequest, match="empty"):
        prompt.room_after([], 4096)


def test_token_that_the_model_does_not_have_is_refused() -> None:
    prompt.check_ids([0, 999], 1000)
    for wrong in (-1, 1000):
        with pytest.raises(InvalidRequest, match=f"{wrong} is not in the vocabulary of 1000"):
            prompt.check_ids([0, wrong, 999], 1000)
