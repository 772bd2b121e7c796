"""Plots of a run: every file is there and is what its name says."""

from __future__ import annotations

import sys
from array import array
from pathlib import Path

import msgspec
import pytest

from dynamo_vllm.bench.http.answers import Answer, StageAnswers
from dynamo_vllm.bench.report import figures, plots, run_report
from dynamo_vllm.errors import ConfigError

pytestmark = pytest.mark.more


def test_missing_library_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'dynamo-vllm\[bench\]'"):
        plots.require(tmp_path)


def test_every_plot_is_drawn_also_of_a_stage_without_answers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gaps = array("f", [0.01, 0.02, 0.03])
    good = [Answer(n, n + 0.1, n + 0.16, n + 0.2, gaps.tobytes(), 4, 8, 4) for n in range(20)]
    bad = [Answer(0.0, ended=0.1, error="HTTP 500: no")]
    stages = [StageAnswers("c=1", 0.0, 20.0, good), StageAnswers("c=2", 0.0, 1.0, bad)]
    reports = []
    for stage in stages:
        found = msgspec.structs.asdict(figures.stage_figures(stage, {}))
        client = run_report.ClientFigures(1, 0.1, 10.0, 0.0)
        reports.append(run_report.StageReport(**found, processes={}, client=client))
    folder = tmp_path / "new" / "plots"
    plots.require(folder)
    plots.draw(run_report.RunReport(url="http://x", settings={}, stages=reports), stages, folder)
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{n}.{k}" for n in ("ttft", "itl", "stages", "timeline") for k in ("svg", "png")}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))
    assert all("<svg" in path.read_text() for path in folder.glob("*.svg"))
