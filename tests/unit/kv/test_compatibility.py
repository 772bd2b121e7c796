"""Terms that two engines must share, and which of two that do not fit has to go."""

from __future__ import annotations

import pytest

from dynamo_vllm.job import Terms
from dynamo_vllm.kv.compatibility import differences
from dynamo_vllm.serving.plane.kv_compatibility import Card

TERMS: Terms = {"vllm": "0.30.0", "dtype": "float32", "block_size": 32, "tensor_parallel_size": 2}


@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_equal_terms_fit_and_widths_may_be_multiples(width: int) -> None:
    assert differences(TERMS, {**TERMS, "tensor_parallel_size": width}) == []


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"block_size": 64}, "block_size is 32 here and 64 there"),
        ({"vllm": "0.32.0"}, "vllm is 0.30.0 here and 0.32.0 there"),
        ({"dtype": "bfloat16"}, "dtype is float32 here and bfloat16 there"),
        ({"kv_layout": "LBHNC"}, "kv_layout is unknown here and LBHNC there"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size is 2 here and 3 there (one must be a multiple"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size is 2 here and 0 there"),
        ({"block_size": None}, "block_size is 32 here and unknown there"),
    ],
)
def test_what_differs_is_named_with_both_values(change: Terms, phrase: str) -> None:
    theirs = {name: value for name, value in {**TERMS, **change}.items() if value is not None}
    (found,) = differences(TERMS, theirs)
    assert found.startswith(phrase)


def card(instance: int, since: float, is_registered: bool = False) -> Card:
    return Card(instance, "a worker", "m", since, {}, is_registered)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (card(9, 5.0), card(1, 6.0)),
        (card(1, 5.0), card(2, 5.0)),
        (card(9, 7.0, is_registered=True), card(1, 6.0)),
    ],
)
def test_of_two_exactly_one_came_before(first: Card, second: Card) -> None:
    assert first.came_before(second)
    assert not second.came_before(first)
