"""The comparison with peers: ratios, tables, markers, and what is sent to whom."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from peers import cold, figures, load, match, page, peers, run, settings
from peers.figures import MEASURES, Measure, Row, Spread

SCRIPTS = Path(__file__).parents[3] / "scripts"
TOKENS = MEASURES[0]


def measured(number: int, peer: str, tokens: float, first_ms: float = 10.0, stage: str = "c=8") -> Row:
    processes = {
        "frontend": {"cpu_us_per_token": 30.0, "tree_cpu_us_per_token": 30.0},
        "worker": {"cpu_us_per_token": 50.0, "tree_cpu_us_per_token": 90.0},
        "engine": {"cpu_us_per_token": 40.0, "tree_cpu_us_per_token": 40.0},
    }
    report = {
        "tokens": {"output_per_second": tokens},
        "ttft_ms": {"p50": first_ms, "p99": first_ms},
        "processes": processes,
    }
    return Row(number, peer, stage, report, "worker", ("frontend", "worker"))


def measure(name: str) -> Measure:
    (found,) = [m for m in MEASURES if m.name == name]
    return found


# -- ratios ------------------------------------------------------------------------------------------


def test_ratio_is_taken_within_each_round_that_both_have() -> None:
    rows = [measured(0, "ours", 200), measured(0, "vllm", 100), measured(1, "vllm", 50)]
    rows += [measured(1, "ours", 75), measured(2, "ours", 300)]
    assert figures.ratios(rows, "ours", "vllm", TOKENS) == [2.0, 1.5]


def test_spread_shows_median_and_both_ends_and_one_value_alone() -> None:
    several, single = Spread.of([3.0, 1.0, 2.0]), Spread.of([1.256])
    assert several and several.show() == "2.00 (1.00–3.00)"
    assert single and single.show(1) == "1.3"
    assert Spread.of([]) is None


def test_cpu_of_a_peer_counts_every_process_once_and_a_missing_figure_is_no_zero() -> None:
    row = measured(0, "ours", 100)
    assert measure("main process CPU").of(row) == 50.0
    assert measure("all CPU").of(row) == 120.0  # the engine is in the worker's tree
    missing = Row(0, "ours", "c=8", {"ttft_ms": {"p50": None}, "processes": {}}, "worker", ("worker",))
    assert [m.of(missing) for m in MEASURES] == [None] * len(MEASURES)


# -- tables ------------------------------------------------------------------------------------------


def test_values_table_has_a_line_per_peer_with_its_title() -> None:
    rows = [measured(0, "ours", 200), measured(0, "vllm", 100)]
    table = figures.values_table(rows, {"vllm": "`vllm serve`"})
    assert [line[:2] for line in table.body] == [("ours", "200"), ("`vllm serve`", "100")]
    assert table.markdown().splitlines()[1].startswith("| --- | --- |")
    assert len({len(line.split("|")) for line in table.markdown().splitlines()}) == 1
    lines = figures.Table(("", "tokens/s"), (("ours", "12345"), ("upstream", "7"))).text().splitlines()
    assert lines == ["          tokens/s", "------------------", "ours         12345", "upstream         7"]


def test_ratio_table_compares_ours_with_all_others_in_each_stage() -> None:
    rows = [
        *(measured(0, "ours", 200), measured(0, "vllm", 100), measured(0, "upstream", 50)),
        *(measured(0, "ours", 90, stage="c=1"), measured(0, "vllm", 100, stage="c=1")),
    ]
    body = figures.ratio_table(rows, "ours", {}).body
    assert [line[:2] for line in body] == [
        ("c=8, vllm", "2.00"),
        ("c=8, upstream", "4.00"),
        ("c=1, vllm", "0.90"),
    ]


# -- markers -----------------------------------------------------------------------------------------


def test_section_between_markers_is_replaced_and_the_rest_kept() -> None:
    first = figures.between_markers("# Page\n\nby hand\n", "peers", "old")
    changed = figures.between_markers(first + "\nafter\n", "peers", "new\n")
    assert changed == "# Page\n\nby hand\n\n<!-- peers:begin -->\nnew\n<!-- peers:end -->\n\nafter\n"
    both = figures.between_markers(changed, "gpu-tiny", "b")
    assert figures.between_markers(both, "peers", "c") == both.replace("\nnew\n", "\nc\n")
    with pytest.raises(ValueError, match="<!-- peers:begin --> without <!-- peers:end -->"):
        figures.between_markers("<!-- peers:begin -->\nold\n", "peers", "new")


# -- the record --------------------------------------------------------------------------------------


MACHINE = {"date": "d", "cpu": "not named", "cores": 2, "arch": "a", "memory_gib": 1, "python": "p"}


def a_record(tmp_path: Path, answer: str = "a") -> dict[str, Any]:
    record = match.Record(
        tmp_path / "results" / "peers.json",
        "make bench-peers",
        {**MACHINE, "packages": {}},
        {"name": "cpu", "text": "What is measured."},
        {"ours": {"commands": ["python -m ours"]}, "vllm": {"commands": ["python -m vllm"]}},
        answers={"vllm": ["a"], "ours": [answer]},
        cold=[{"title": "`vllm serve`", "round": 0, "seconds": 30.0}],
        missing={"vllm-rust": "no binary"},
    )
    for row in (measured(0, "vllm", 100), measured(0, "ours", 150)):
        kept = {"round": row.round, "peer": row.peer, "stage": row.stage, "main": row.main}
        record.rows.append(kept | {"roots": list(row.roots), "report": dict(row.report)})
    record.save()
    return dict(json.loads(record.path.read_bytes()))


def test_saved_record_gives_the_same_tables(tmp_path: Path) -> None:
    record = a_record(tmp_path)
    section = page.markdown(record)
    rows = ("Written by `make bench-peers`", "### c=8", "| c=8, `vllm serve` | 1.50 |", "no binary", "30.0")
    assert all(part in section for part in rows)
    assert "The greedy answers of all were equal." in section
    assert "left out: `vllm serve`, Rust front end: no binary" in page.text(record)
    differing = a_record(tmp_path, answer="b")
    assert "ANSWERS DIFFER: prompt 1: vllm says 'a', ours says 'b'" in page.text(differing)
    assert "equal" not in page.markdown(differing)


def test_files_of_several_gpu_runs_become_one_with_rounds_counted_on(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPTS / "gpu" / "bench.py")
    assert spec and spec.loader
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    first, second = a_record(tmp_path), a_record(tmp_path)
    second["peers"] = {"vllm-rust": {"commands": ["python -m rust"]}}
    merged: dict[str, dict[str, Any]] = {}
    for record in (first, second):
        bench.merge(merged, record)
    assert [(row["round"], row["peer"]) for row in merged["cpu"]["rows"]] == [
        (0, "vllm"),
        (0, "ours"),
        (1, "vllm"),
        (1, "ours"),
    ]
    assert merged["cpu"]["missing"] == {}  # it ran the second time
    assert "### c=8" in page.markdown(merged["cpu"])


# -- what is sent and started ------------------------------------------------------------------------


def test_every_peer_gets_the_same_load() -> None:
    stage = settings.Stage(8, 64)
    words = load.words("http://a", stage, 5, None)
    assert words[1:] == load.words("http://b", stage, 5, None)[1:]
    assert "--requests" in words and "--seconds" not in words
    assert "--seconds" in load.words("http://a", settings.Stage(8, 64, seconds=3), 5, 4)


def a_place(tmp_path: Path) -> peers.Place:
    setting = settings.Setting("cpu", tmp_path / "tiny", settings.CPU_FLAGS, (), "")
    return peers.Place("/usr/bin/python", setting, tmp_path, 8000)


def test_every_vllm_gets_all_engine_flags_and_no_folder_of_this_machine_is_shown(tmp_path: Path) -> None:
    place = a_place(tmp_path)
    flags = list(place.engine_flags)
    for name, peer in peers.PEERS.items():
        shown = [peers.show(part) for part in peer.parts(place)]
        assert not any("/usr" in command or str(tmp_path) in command for command in shown)
        if name != "sglang":
            engine = peer.parts(place)[-1]
            at = engine.command.index(flags[0])
            assert list(engine.command[at : at + len(flags)]) == flags
            assert ("VLLM_PLUGINS" in engine.variables) == (not name.startswith("ours"))


def test_environment_leaves_out_what_the_shell_set_for_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_FILE_KV", "/elsewhere")
    monkeypatch.setenv("DYN_NAMESPACE", "theirs")
    env = settings.Setting("cpu", Path("m"), (), (), "").environment()
    assert "DYN_NAMESPACE" not in env and "DYN_FILE_KV" not in env
    assert env["DYN_TCP_RPC_HOST"] == "127.0.0.1"


def test_cold_start_is_what_a_user_types_and_the_same_engine_once_more(tmp_path: Path) -> None:
    setting = settings.Setting(
        "cpu", tmp_path, settings.CPU_FLAGS, (), "", variables=dict(settings.CPU_VARIABLES)
    )
    ours, theirs, same = cold.ways(setting)
    assert "--distributed-executor-backend" not in ours.setting.flags + theirs.setting.flags
    assert ours.setting == theirs.setting
    assert same.setting == setting


def test_8b_shape_spells_every_id_in_ascii(tmp_path: Path) -> None:
    folder = settings.make_8b_shape(tmp_path / "8b")
    config = json.loads((folder / "config.json").read_bytes())
    words = json.loads((folder / "tokenizer.json").read_bytes())["model"]["vocab"]
    assert config["num_hidden_layers"] == 32
    assert sorted(words.values()) == list(range(config["vocab_size"]))
    assert settings.VOCABULARY[1] < len(words)


def test_options_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--peers", "ours,nobody"])
    assert "nobody is no peer; known are bare, ours" in capsys.readouterr().err
    quick = run.parse(["--quick"])
    assert (quick.rounds, quick.cold) == (2, 0), "nothing starts cold"
    short, full = (sum(s.requests for s in run.stages([1, 8, 32], q)) for q in (True, False))
    assert short < full
