"""Figures of many workers and several frontends, and what a machine must allow for them."""

from __future__ import annotations

import json
import resource
from typing import Any

import pytest

from dynamo_vllm.bench.http.answers import Answer, StageAnswers
from dynamo_vllm.bench.load.command import LoadOutcome
from dynamo_vllm.bench.load.prompts import Conversation, PromptSpec
from dynamo_vllm.bench.local import scale, scale_figures
from dynamo_vllm.bench.local.scale_figures import Begun, Combination, LoadFigures
from dynamo_vllm.bench.report.figures import Requests, Spread
from dynamo_vllm.bench.report.processes import ProcessFigures
from dynamo_vllm.bench.report.run_report import RunReport
from dynamo_vllm.config import build
from dynamo_vllm.config.options import ScaleOptions
from dynamo_vllm.config.rules import bench_local
from dynamo_vllm.engine.fake.cached_blocks import sequence
from dynamo_vllm.engine.fake.spec import parse_spec
from dynamo_vllm.errors import ConfigError
from harness.stage_reports import stage_report


def figures(**changes: Any) -> LoadFigures:
    counts = {"ok": 10, "failed": 0, "streams": 8, "tokens": 640, "tokens_per_second": 1000.0}
    costs = {"frontend_us": 40.0, "worker_us": 50.0, "client_us": 10.0, "client_utilisation": 0.1}
    sizes = {"ttft_ms": 20.0, "frontend_rss_mb": 130.0, "worker_rss_mb": 90.0}
    return LoadFigures(**{**counts, **costs, **sizes, "errors": {}, **changes})


def combination(blocks: int = 0, rounds: list[LoadFigures] | None = None) -> Combination:
    rss, cpu = (320.0, 3.0) if blocks else (120.0, 1.0)
    begun = Begun(1.5, 9.5 if blocks else None, cpu, rss)
    late = Begun(0.25, 2.5 if blocks else None, cpu, rss + 50 if blocks else rss)
    return Combination(1, 2, blocks, begun, late, 0.6, rounds or [])


def test_options_of_a_measurement() -> None:
    assert bench_local.counts("--workers", "64, 8,32") == [8, 32, 64]
    options, _ = build.parse(ScaleOptions, ["--output", "f"], {}, "prog", "about")
    assert options.json == "f"
    clients = {((1, 2, 4), 16): 8, ((1, 2), 2): 2, ((1, 3), 16): 9, ((1,), 1): 1}
    assert {case: scale.client_count([*case[0]], case[1]) for case in clients} == clients


def test_streams_that_need_more_open_files_are_refused_with_the_fix() -> None:
    options = ScaleOptions(frontends="1,2", workers="8", streams=10_000)
    scale.refuse_too_few_files(options, 20_500)
    scale.refuse_too_few_files(options, resource.RLIM_INFINITY)
    with pytest.raises(ConfigError, match=r"needs 20500 open files.*allows 20000.*ulimit -Hn 20500"):
        scale.refuse_too_few_files(options, 20_000)
    scale.refuse_too_few_files(ScaleOptions(frontends="2", workers="8", streams=10_000), 20_000)


def test_inotify_instances_of_everything_that_runs_at_the_same_time() -> None:
    once = scale.watches_needed(ScaleOptions(frontends="1,2", workers="8,32"))
    assert once == 2 * 32 + 3 * scale.WATCHES + 20
    assert (
        scale.watches_needed(ScaleOptions(frontends="1,2", workers="8,32", cached_blocks=5)) == 2 * once - 20
    )


def test_series_of_a_metric_with_the_labels_are_added_up() -> None:
    page = 'a{x="1",y="2"} 3\na{x="1"} 4\n# a{x="1"} 8\nab{x="1",y="2"} 5\n'
    assert scale.total(page, "a") == 7
    assert scale.total(page, "a", 'x="1"', 'y="2"') == 3


def test_prompts_of_the_load_are_among_the_cached_sequences() -> None:
    """Worker 1 of 3 has announced prompts 1, 4, 7, …"""
    spec = parse_spec(json.dumps(scale.fake_engine(1, 3, 64, ScaleOptions(input_tokens=96))))
    (cached,) = spec.cached
    prompts = PromptSpec(
        kind="random",
        api="completions",
        model="m",
        input_tokens=96,
        output_tokens=1,
        vocab=(10, 900),
        seed=scale.SEED,
        stage="0",
    )
    for at, number in enumerate((1, 4)):
        body = json.loads(Conversation(prompts, number).next_body(()))
        assert sequence(cached, at, 2048)[:96] == body["prompt"]


def test_figures_of_all_processes_are_added_and_failures_kept() -> None:
    used = ProcessFigures(0.03, 30.0, 0.03, 30.0, 100.0)
    stage = stage_report(
        requests=Requests(4, 1, 0, 2.0),
        ttft_ms=Spread(p50=7.0),
        processes={"f0": used, "f1": used, "w0": used, "w1": None},
        errors={"refused": 1},
    )
    answers = [Answer(sent=0.0, ended=2.0), Answer(sent=1.0, ended=3.0), Answer(sent=2.0, ended=4.0)]
    outcome = LoadOutcome(
        RunReport(url="u", settings={}, stages=[stage]), [StageAnswers("c=2", 0.0, 4.0, answers)]
    )
    found = scale_figures.load_figures(outcome, ["f0", "f1"], ["w0", "w1"])
    assert (found.frontend_us, found.worker_us, found.frontend_rss_mb) == (60.0, 30.0, 100.0)
    assert (found.ok, found.failed, found.streams, found.tokens) == (4, 1, 2, 1000)
    assert (found.ttft_ms, found.errors) == (7.0, {"refused": 1})


def test_report_has_a_row_for_each_combination_and_the_cost_of_blocks() -> None:
    rounds = [figures(), figures(tokens_per_second=2000.0, failed=3), figures(ttft_ms=None)]
    text = scale_figures.report([combination(rounds=rounds), combination(1_000_000, rounds)])
    head, plain, cached, blocks = text.splitlines()
    assert head.split()[:3] == ["FRONTENDS", "×", "WORKERS"]
    assert "1000 (1000–2000)" in plain and plain.split()[-4:] == ["3", "120", "130", "0.60"]
    assert "1 × 2, 1000000 blocks" in cached
    assert "had them 9.5 s after" in blocks and "late frontend after 2.5 s" in blocks
    assert "100 MB (late 125 MB) and 1.0 s of CPU time" in blocks


def test_combination_without_a_round_is_in_the_report() -> None:
    assert "–" in scale_figures.report([combination()]).splitlines()[1]


def test_nothing_starts_after_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Combination] = []
    scale.measure(ScaleOptions(max_seconds=1e-9), {}, found, lambda: None)
    assert found == []
    assert "--max-seconds is over: 1 × 8 and what follows is left out" in capsys.readouterr().out
