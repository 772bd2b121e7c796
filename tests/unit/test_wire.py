"""Whatever arrives, `wire.parse` and the sampling codec give a value or an InvalidRequest."""

from __future__ import annotations

import copy
import string
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamo_vllm import wire
from dynamo_vllm.codec import sampling
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import SamplingSpec

FACTS = facts_of(FakeSpec(context_length=4096, vocab_size=1000))
VALID: dict[str, Any] = msgspec.to_builtins(wire.parse({"token_ids": [1, 2, 3], "routing": {"dp_rank": 0}}))
VALID["stop_conditions"] |= {"max_tokens": 5, "stop": ["x"], "stop_token_ids": [1]}
VALID["sampling_options"] |= {"n": 1, "temperature": 0.8999999761581421, "guided_decoding": {"regex": "a+"}}
VALID["mdc_sum"] = "a field we do not know"
NUMBERS = st.integers(-(2**64), 2**64) | st.floats() | st.sampled_from([-1, 0, 1, 2, 20, 128, 999, 1000])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
# No field takes any of these.
WRONG = st.sampled_from([object(), b"bytes", {"a": 1}, [[]], [{}], "text", True, 1.5, {1: 2}, ["a", 1]])


def paths(value: dict[str, Any], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The way to every field, also inside the nested structs."""
    found = []
    for name, inner in value.items():
        found.append((*prefix, name))
        if isinstance(inner, dict):
            found += paths(inner, (*prefix, name))
    return found


def replaced(path: tuple[str, ...], value: object) -> dict[str, Any]:
    request = copy.deepcopy(VALID)
    inner = request
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return request


def parses(raw: object) -> wire.GenerateRequest | None:
    try:
        return wire.parse(raw)
    except InvalidRequest as exc:
        assert str(exc)
        return None


def test_request_of_the_frontend_parses_and_the_least_one_with_defaults() -> None:
    request = wire.parse(VALID)
    assert request.stop_conditions.max_tokens == 5
    assert request.is_health_check is False
    request = wire.parse({"token_ids": [1], "_HEALTH_CHECK": True})
    assert request.is_health_check is True
    assert request.sampling_options == wire.SamplingOptions()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("token_ids",), None, "token_ids"),
        (("token_ids",), [1, "2"], "token_ids[1]"),
        (("token_ids",), [1, True], "token_ids[1]"),
        (("stop_conditions", "max_tokens"), "5", "stop_conditions.max_tokens"),
        (("stop_conditions", "max_tokens"), 5.5, "stop_conditions.max_tokens"),
        (("stop_conditions", "stop"), "x", "stop_conditions.stop"),
        (("sampling_options", "guided_decoding", "regex"), 3, "sampling_options.guided_decoding.regex"),
        (("sampling_options", "logit_bias"), {"one": 1.0}, "sampling_options.logit_bias"),
        (("sampling_options", "logit_bias"), {1: "one"}, "sampling_options.logit_bias[...]"),
        (("routing", "dp_rank"), "0", "routing.dp_rank"),
        (("routing",), [], "routing"),
    ],
)
def test_field_of_the_wrong_type_is_named_with_its_path(
    path: tuple[str, ...], value: object, named: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        wire.parse(replaced(path, value))
    assert str(refusal.value).startswith(f"{named}: ")


def test_something_else_than_a_request_is_refused() -> None:
    others: list[object] = [None, [], "text", 3, b"bytes", {}, {"token_ids": None}]
    for raw in others:
        with pytest.raises(InvalidRequest):
            wire.parse(raw)


# No strategy here is slow; a machine that stops for a second is.
FEW = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


@given(JSON)
@FEW
def test_any_json_is_parsed_or_refused(raw: object) -> None:
    parses(raw)


@given(st.sampled_from(paths(VALID)), JSON | WRONG)
@FEW
def test_one_replaced_field_is_parsed_or_refused_by_name(path: tuple[str, ...], value: object) -> None:
    try:
        wire.parse(replaced(path, value))
    except InvalidRequest as exc:
        # The field itself, or one inside it.
        assert str(exc).startswith(".".join(path))


@given(
    path=st.sampled_from(
        [
            path
            for path in paths(VALID)
            if path[0] in ("stop_conditions", "sampling_options", "output_options")
        ]
    ),
    value=NUMBERS | st.lists(NUMBERS, max_size=3),
    room=st.integers(1, 5000),
)
@FEW
def test_any_number_gives_a_spec_or_a_refusal(path: tuple[str, ...], value: object, room: int) -> None:
    request = parses(replaced(path, value))
    if request is None:
        return
    try:
        spec = sampling.from_tokens(request, room, FACTS)
    except InvalidRequest as exc:
        assert path[-1].split("_visible")[0].split("_hidden")[0] in str(exc)
        return
    assert isinstance(spec, SamplingSpec)
    assert 1 <= spec.max_tokens <= room
    assert 0 <= spec.min_tokens <= spec.max_tokens


@given(st.dictionaries(st.sampled_from(list(wire.SamplingOptions.__struct_fields__)), NUMBERS, max_size=6))
@FEW
def test_any_mixture_of_numbers_gives_a_spec_or_a_refusal(options: dict[str, float]) -> None:
    request = parses({"token_ids": [1], "sampling_options": options})
    if request is not None:
        try:
            assert sampling.from_tokens(request, 100, FACTS).n >= 1
        except InvalidRequest as exc:
            assert str(exc)[0] in string.printable
