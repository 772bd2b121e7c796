"""What alternating rounds say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm.bench.load import command
from dynamo_vllm.bench.local import plane, routing
from dynamo_vllm.bench.report.rounds import Range, alternating, ratios, spread, write_json
from dynamo_vllm.cli import main


def test_every_second_round_goes_backwards() -> None:
    assert list(alternating(("a", "b"), 3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_ratios_are_taken_round_by_round_and_shown_with_as_many_digits_as_matter() -> None:
    """A machine that is twice as slow in one round changes no ratio."""
    assert spread([3.0, 1.0, 10.0]) == Range(3.0, 1.0, 10.0), "median, smallest, largest"
    assert ratios([10.0, 20.0], [5.0, 10.0]) == Range(2.0, 2.0, 2.0)
    assert ratios([1.0], [0.0]) is None
    assert str(Range(1234.5, 1000.0, 2000.0)) == "1234 (1000–2000)"
    assert str(Range(12.34, 12.0, 13.0)) == "12.3 (12.0–13.0)"
    assert str(Range(1.234, 1.0, 1.5)) == "1.23 (1.00–1.50)"


@pytest.mark.parametrize(
    ("module", "words"),
    [(command, "load --requests 1"), (plane, "plane"), (routing, "routing --trace t.jsonl")],
)
@pytest.mark.parametrize("place", ["gone/figures.json", "folder"])
def test_figures_that_cannot_be_written_are_refused_before_anything_is_measured(
    module: object,
    words: str,
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(module, "measure", lambda *_: pytest.fail("it began"))
    assert main.run(["bench", *words.split(), "--json", str(tmp_path / place)]) == 2
    assert f"--json {tmp_path / place} cannot be written" in capsys.readouterr().err


def test_figures_are_written_where_asked(tmp_path: Path) -> None:
    write_json(None, {})
    write_json(tmp_path / "f.json", {"r": Range(1.0, 1.0, 1.0)})
    assert '"median": 1.0' in (tmp_path / "f.json").read_text()
