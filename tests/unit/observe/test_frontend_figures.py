"""The figures of a frontend, from the text of its /metrics."""

from __future__ import annotations

import pytest

from dynamo_vllm.observe import frontend_figures
from dynamo_vllm.observe.frontend_figures import growth, percentile, share_within

INF = float("inf")
PAGE = b"""\
# HELP dynamo_frontend_inflight_requests x
dynamo_frontend_inflight_requests{model="a"} 2
dynamo_frontend_inflight_requests{model="b"} 1
dynamo_frontend_input_sequence_tokens_sum{model="a"} 28
dynamo_frontend_inter_token_latency_seconds_bucket{model="a",le="0.01"} 5
dynamo_frontend_inter_token_latency_seconds_bucket{model="a",le="+Inf"} 9
dynamo_frontend_output_tokens_total{model="a"} 61
dynamo_frontend_requests_total{error_type="",model="a",status="success"} 7
dynamo_frontend_requests_total{error_type="internal",model="a",status="error"} 2
dynamo_frontend_requests_total{model="status=\\"error\\"",status="success"} 1
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="0"} 0
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="1"} 4
dynamo_frontend_time_to_first_token_seconds_bucket{model="b",le="1"} 1
dynamo_frontend_time_to_first_token_seconds_bucket{model="a",le="+Inf"} 4
dynamo_frontend_time_to_first_token_seconds_bucket{model="b",le="+Inf"} 2
dynamo_component_router_requests_total{status="error"} 100"""


def test_figures_are_summed_over_models_and_those_of_others_left_out() -> None:
    found = frontend_figures.read(PAGE)
    assert (found.in_flight, found.requests, found.errors) == (3, 10, 2)
    assert (found.output_tokens, found.prompt_tokens) == (61, 28)
    assert found.ttft_seconds == {0: 0, 1: 5, INF: 6}
    assert found.itl_seconds == {0.01: 5, INF: 9}


def test_prefix_of_the_names_is_the_frontends_own_and_a_page_without_models_has_no_figures() -> None:
    found = frontend_figures.read(PAGE.replace(b"dynamo_frontend", b"ours"))
    assert (found.in_flight, found.requests) == (3, 10)
    for page in (b"", b"<html>", PAGE.replace(b"_inflight_requests", b"_x")):
        assert frontend_figures.read(page) == frontend_figures.FrontendFigures()


def test_growth_of_a_restarted_frontend_is_all_it_has() -> None:
    assert growth({1.0: 3, INF: 5}, {1.0: 4, INF: 9}) == {1.0: 1, INF: 4}
    assert growth({1.0: 3, INF: 5}, {1.0: 1, INF: 2}) == {1.0: 1, INF: 2}
    assert growth({}, {1.0: 1}) == {1.0: 1}


def test_percentiles_lie_between_the_bounds_of_their_bucket() -> None:
    buckets = {0.0: 0.0, 1.0: 50.0, 2.0: 100.0, INF: 100.0}
    assert percentile(buckets, 0.5) == pytest.approx(1.0)
    assert percentile(buckets, 0.9) == pytest.approx(1.8)
    assert percentile({1.0: 0.0, INF: 4.0}, 0.5) == 1.0
    assert percentile({1.0: 0.0, INF: 0.0}, 0.5) is None
    assert percentile({}, 0.5) is None


def test_share_within_a_limit() -> None:
    buckets = {0.0: 0.0, 1.0: 50.0, 2.0: 100.0, INF: 110.0}
    assert share_within(buckets, 1.0) == pytest.approx(50 / 110)
    assert share_within(buckets, 1.5) == pytest.approx(75 / 110)
    assert share_within(buckets, 5.0) == pytest.approx(100 / 110)
    assert share_within({1.0: 0.0}, 1.0) is None


def test_histograms_of_all_models_are_added() -> None:
    """Between the buckets of two models stand the sum and the count of the first."""
    name = "dynamo_frontend_time_to_first_token_seconds"
    lines = ['dynamo_frontend_inflight_requests{model="a"} 1', f"# TYPE {name} histogram"]
    for model, count in (("a", 2), ("b", 5)):
        lines += [f'{name}_bucket{{model="{model}",le="{bound}"}} {count}' for bound in ("0.5", "+Inf")]
        lines += [f'{name}_sum{{model="{model}"}} 0.4', f'{name}_count{{model="{model}"}} {count}']
    lines += ["# TYPE other counter", f'{name}_bucket{{model="c",le="0.5"}} 100', ""]
    found = frontend_figures.read("\n".join(lines).encode())
    assert found.ttft_seconds == {0.5: 7.0, float("inf"): 7.0}
