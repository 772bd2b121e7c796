"""From a request's options to a SamplingSpec: what is refused, what is filled in, what is mended."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from dynamo_vllm import wire, wire_openai
from dynamo_vllm.codec import prompt, sampling
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import EngineFacts, Guide, SamplingSpec

FACTS = EngineFacts(
    context_length=4096,
    vocab_size=1000,
    block_size=32,
    total_kv_blocks=128,
    max_num_seqs=16,
    max_num_batched_tokens=4096,
)


def tokens(room: int = 100, facts: EngineFacts = FACTS, **sections: Any) -> SamplingSpec:
    return sampling.from_tokens(wire.parse({"token_ids": [1], **sections}), room, facts)


def text(room: int = 100, **fields: Any) -> SamplingSpec:
    return sampling.from_text(wire_openai.parse({"prompt": "a", **fields}), room, FACTS)


def chat(room: int = 100, **fields: Any) -> SamplingSpec:
    return sampling.from_text(wire_openai.parse({"messages": [{}], **fields}), room, FACTS)


def test_bare_request_gets_the_engines_defaults_and_all_the_room() -> None:
    assert tokens(room=70) == SamplingSpec(max_tokens=70)


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [
        ("stop_conditions", "max_tokens", 0),
        ("stop_conditions", "max_tokens", -5),
        ("stop_conditions", "min_tokens", -1),
        ("stop_conditions", "stop", ["a", "b", "c", "d", "e"]),
        ("stop_conditions", "stop", ["a", ""]),
        ("stop_conditions", "stop", ["a" * 1025]),
        ("stop_conditions", "stop_token_ids", list(range(257))),
        ("stop_conditions", "stop_token_ids", [1000]),
        ("stop_conditions", "stop_token_ids", [-1]),
        ("stop_conditions", "max_thinking_tokens", -1),
        ("sampling_options", "temperature", -1.0),
        ("sampling_options", "temperature", 2.1),
        ("sampling_options", "temperature", math.nan),
        ("sampling_options", "temperature", math.inf),
        ("sampling_options", "top_p", 0.0),
        ("sampling_options", "top_p", 1.1),
        ("sampling_options", "top_p", math.nan),
        ("sampling_options", "top_k", -2),
        ("sampling_options", "min_p", -0.1),
        ("sampling_options", "min_p", 1.5),
        ("sampling_options", "presence_penalty", 2.5),
        ("sampling_options", "frequency_penalty", -2.5),
        ("sampling_options", "repetition_penalty", 0.0),
        ("sampling_options", "repetition_penalty", math.nan),
        ("sampling_options", "n", 0),
        ("sampling_options", "n", -1),
        ("sampling_options", "n", 129),
        ("sampling_options", "best_of", 2),
        ("sampling_options", "use_beam_search", True),
        ("sampling_options", "length_penalty", 0.5),
        ("sampling_options", "seed", 2**63),
        ("sampling_options", "seed", -(2**63) - 1),
        ("sampling_options", "logit_bias", {1000: 1.0}),
        ("sampling_options", "logit_bias", dict.fromkeys(range(513), 1.0)),
        ("sampling_options", "logit_bias", {1: 101.0}),
        ("sampling_options", "logit_bias", {1: math.nan}),
        ("output_options", "logprobs", 50),
        ("output_options", "logprobs", -1),
        ("output_options", "prompt_logprobs", 21),
    ],
)
def test_value_out_of_range_is_refused_by_the_name_of_its_field(
    section: str, field: str, value: object
) -> None:
    wrong: Any = {section: {field: value}}
    with pytest.raises(InvalidRequest) as refusal:
        tokens(**wrong)
    assert refusal.value.parameter == field
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    ("section", "field", "value", "expected"),
    [
        ("stop_conditions", "max_tokens", 1, {"max_tokens": 1}),
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


def test_longer_answers_are_cut_to_the_room() -> None:
    assert tokens(room=10, stop_conditions={"max_tokens": 500}).max_tokens == 10


def test_min_tokens_never_exceed_max_tokens() -> None:
    """A request that moved keeps its first min_tokens while max_tokens has shrunk."""
    spec = tokens(stop_conditions={"max_tokens": 5, "min_tokens": 50})
    assert (spec.min_tokens, spec.max_tokens) == (5, 5)


def test_stop_ids_of_all_kinds_are_merged_without_doubles() -> None:
    stop = {"stop_token_ids": [5, 6], "stop_token_ids_visible": [6, 7], "stop_token_ids_hidden": [2]}
    assert tokens(stop_conditions=stop).stop_token_ids == (5, 6, 7, 2)


def test_ignored_eos_leaves_the_hidden_stop_ids_out() -> None:
    stop = {"stop_token_ids": [5], "stop_token_ids_hidden": [2], "ignore_eos": True}
    assert tokens(stop_conditions=stop).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("arrived", "meant"),
    [
        (0.8999999761581421, 0.9),
        (0.699999988079071, 0.7),
        (1.100000023841858, 1.1),
        (0.30000001192092896, 0.3),
        (0.123456791043, 0.12345679),
        (1.0, 1.0),
        (0.0, 0.0),
        (-1.5, -1.5),
        (None, None),
    ],
)
def test_float_that_went_through_32_bits_is_the_clients_again(
    arrived: float | None, meant: float | None
) -> None:
    assert sampling.shortest_float(arrived) == meant


def test_rounding_leaves_alone_what_is_no_number() -> None:
    assert sampling.shortest_float(math.inf) == math.inf
    assert math.isnan(sampling.shortest_float(math.nan) or 0)
    assert sampling.shortest_float(1e300) == 1e300


def test_penalties_and_probabilities_arrive_rounded() -> None:
    spec = tokens(
        sampling_options={"temperature": 0.8999999761581421, "presence_penalty": 0.10000000149011612}
    )
    assert (spec.temperature, spec.presence_penalty) == (0.9, 0.1)


def test_models_own_defaults_fill_what_the_request_leaves_out() -> None:
    facts = dataclasses.replace(FACTS, sampling_defaults={"temperature": 0.6, "top_k": 20, "unknown": 1.0})
    spec = tokens(facts=facts, sampling_options={"top_k": 5})
    assert (spec.temperature, spec.top_k) == (0.6, 5)


def test_penalties_have_defaults_too() -> None:
    """vLLM reads them from a model's generation config since 0.31."""
    defaults = {"presence_penalty": 1.5, "frequency_penalty": 0.5}
    spec = tokens(
        facts=dataclasses.replace(FACTS, sampling_defaults=defaults),
        sampling_options={"presence_penalty": 0.0},
    )
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


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        ({"regex": "a", "choice": ["b"]}, "regex and choice cannot be combined"),
        ({"json": True, "grammar": "g"}, "json_object and grammar cannot be combined"),
        ({"choice": []}, "non-empty strings"),
        ({"choice": ["a", ""]}, "non-empty strings"),
    ],
)
def test_contradicting_constraints_are_refused(guided: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokens(sampling_options={"guided_decoding": guided})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("guided", "message"),
    [
        ({"json": nested(100)}, "response_format: nested"),
        ({"json": json.dumps(nested(100))}, "response_format: nested"),
        ({"json": "[" * 100_000}, "response_format: nested"),
        ({"structural_tag": {"structures": [{"schema": nested(100)}]}}, "guided_structural_tag: nested"),
        ({"json": {"enum": ["a" * 600_000]}}, "response_format: has 600014 characters"),
        ({"regex": "a" * 600_000}, "guided_regex: has 600000 characters"),
        ({"choice": ["a" * 300_000, "b" * 300_000]}, "guided_choice: has 600000 characters"),
    ],
)
def test_constraints_that_would_hold_the_worker_up_are_refused(guided: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        tokens(sampling_options={"guided_decoding": guided})
    assert tokens(sampling_options={"guided_decoding": {"json": nested(40)}}).guide is not None


# --- text mode --------------------------------------------------------------------------------------------


def test_completion_without_max_tokens_gets_openais_sixteen() -> None:
    assert text().max_tokens == 16
    assert text(max_tokens=None, room=7).max_tokens == 7


def test_chat_without_max_tokens_gets_all_the_room_and_its_newer_name_wins() -> None:
    assert chat().max_tokens == 100
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6


def test_text_mode_leaves_stop_strings_to_the_engine() -> None:
    spec = text(stop="end", max_tokens=3)
    assert (spec.stop, spec.detokenize) == (["end"], True)


def test_text_mode_refuses_a_fifth_stop_string() -> None:
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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Guide(json_object=True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "object"}},
                }
            },
            Guide(json={"type": "object"}),
        ),
        ({"guided_json": {"type": "object"}}, Guide(json={"type": "object"})),
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


@pytest.mark.parametrize(
    "chosen",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {}},
        {"type": "structural_tag"},
        {"type": "structural_tag", "triggers": ["<a>"]},
    ],
)
def test_unknown_or_incomplete_response_format_is_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        chat(response_format=chosen)
    assert refusal.value.parameter == "response_format"


# --- the prompt -------------------------------------------------------------------------------------------


def test_room_is_what_fits_behind_the_prompt() -> None:
    assert prompt.room_after([1] * 4095, 4096) == 1


def test_prompt_that_fills_the_context_is_too_long() -> None:
    with pytest.raises(TooLong, match="prompt has 4096 tokens; this model takes 4096"):
        prompt.room_after([1] * 4096, 4096)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        prompt.room_after([], 4096)


@pytest.mark.parametrize("wrong", [-1, 1000])
def test_token_that_the_model_does_not_have_is_refused(wrong: int) -> None:
    prompt.check_ids([0, 999], 1000)
    with pytest.raises(InvalidRequest, match=f"{wrong} is not in the vocabulary of 1000"):
        prompt.check_ids([0, wrong, 999], 1000)
