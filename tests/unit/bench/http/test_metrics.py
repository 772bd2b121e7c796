"""Counters on a page of Prometheus metrics."""

from __future__ import annotations

from dynamo_vllm.bench.http import metrics

PAGE = """# HELP vllm:prefix_cache_hits_total x
vllm:prefix_cache_hits_total{engine="0"} 64.0
vllm:prefix_cache_hits_total{engine="1"} 1.5e+02
vllm:prefix_cache_hits_created{engine="0"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0"} 900.0
"""


def test_counter_is_summed_over_its_series_with_either_name() -> None:
    assert metrics.total(PAGE, "vllm:prefix_cache_hits") == 214.0
    assert metrics.total(PAGE, "vllm:prefix_cache_hits_total") == 214.0


def test_counter_that_nobody_counts_is_not_zero() -> None:
    assert metrics.total(PAGE, "vllm:prefix_cache_misses") is None


def test_page_of_something_else_has_no_counters() -> None:
    assert metrics.total("<html><body>It works</body></html>", "vllm:prefix_cache_hits") is None
