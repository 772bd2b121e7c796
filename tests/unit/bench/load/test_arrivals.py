"""When requests are sent."""

from __future__ import annotations

import itertools

import pytest

from dynamo_vllm.bench.load import arrivals


def test_poisson_arrivals_have_the_mean_and_the_spread_of_their_rate() -> None:
    at = list(itertools.islice(arrivals.moments(20.0, "poisson", "seed"), 20_000))
    gaps = [b - a for a, b in itertools.pairwise(at)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert mean == pytest.approx(1 / 20, rel=0.03)
    assert variance**0.5 == pytest.approx(1 / 20, rel=0.05), "an exponential's deviation is its mean"
    assert min(gaps) >= 0


def test_same_seed_same_moments() -> None:
    first, again, other = (list(itertools.islice(arrivals.moments(5, "poisson", s), 50)) for s in "aab")
    assert first == again != other


def test_even_arrivals_keep_their_distance() -> None:
    assert list(itertools.islice(arrivals.moments(4.0, "even", "seed"), 4)) == [0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(("steps", "rates"), [(1, [9.0]), (2, [1.0, 9.0]), (5, [1.0, 3.0, 5.0, 7.0, 9.0])])
def test_ramp_goes_from_first_to_last(steps: int, rates: list[float]) -> None:
    assert arrivals.ramp(1.0, 9.0, steps) == rates
