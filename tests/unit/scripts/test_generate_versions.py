"""What was run with which vLLM: what follows from it for the page and for warnings."""

from __future__ import annotations

import ast
from datetime import date
from pathlib import Path

import pytest
import setup_packages
from generate import versions
from generate.versions import Run

from dynamo_vllm.engine.vllm.compat.not_proven import NOT_PROVEN
from dynamo_vllm.engine.vllm.compat.versions import EVERYTHING, ON_GPU

PAIRS = "prefill and decode apart"


def run(day: int, *ran: str, failed: tuple[str, ...] = (), device: str = "CPU", vllm: str = "0.31.0") -> Run:
    return Run(vllm, "aarch64", device, ran, date(2026, 11, day), failed)


def test_page_and_warnings_are_what_the_runs_say() -> None:
    assert versions.main(["--check"]) == 0, "run 'make docs'"


def test_stale_files_fail_the_check_and_writing_mends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PAGE", "MODULE", "RUNS"):
        copy = tmp_path / getattr(versions, name).name
        copy.write_text(getattr(versions, name).read_text())
        monkeypatch.setattr(versions, name, copy)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "_exists", lambda name: True)
    with versions.RUNS.open("a") as file:
        file.write('[[run]]\nvllm = "0.31.0"\nmachine = "x86_64"\ndevice = "L4"\n')
        file.write('ran = ["cpu"]\ndate = 2099-01-02\n')
    assert versions.main(["--check"]) == 1
    told = capsys.readouterr().err
    assert "versions.md is not what tests/runs.toml says" in told and "not_proven.py is not" in told
    assert versions.main([]) == 0 and versions.main(["--check"]) == 0
    assert "L4 (x86_64) 2099-01-02" in versions.PAGE.read_text()


def test_every_part_that_is_warned_of_is_shown_by_something() -> None:
    names = [*versions.SHOWN_BY]
    assert [name for name in names if name in (*EVERYTHING, *ON_GPU)] == [*EVERYTHING, *ON_GPU]
    assert set(names) - {*EVERYTHING, *ON_GPU} == {versions.OMNI, versions.CONTRACT}
    assert all(versions._exists(file) for files in versions.SHOWN_BY.values() for file in files)


def test_all_files_are_needed() -> None:
    files = versions.SHOWN_BY[PAIRS]
    assert versions.proven("0.31.0", PAIRS, [run(1, *files[1:])]) == {"CPU (aarch64)": "in part"}
    assert versions.proven("0.31.0", PAIRS, [run(1, *files[1:]), run(2, files[0])]) == {
        "CPU (aarch64)": "2026-11-02"
    }
    assert versions.proven("0.31.0", PAIRS, [run(1, "cpu", vllm="0.30.0")]) == {}


def test_later_run_in_the_same_place_counts() -> None:
    broken = run(1, "cpu", failed=("cpu/test_lora",))
    assert versions.proven("0.31.0", "LoRA", [broken]) == {"CPU (aarch64)": "fails"}
    assert not versions.is_proven("0.31.0", "LoRA", [broken])
    assert versions.is_proven("0.31.0", "sleep", [broken])
    mended = [broken, run(2, "cpu/test_lora")]
    assert versions.is_proven("0.31.0", "LoRA", mended)
    assert not versions.is_proven("0.31.0", "LoRA", [*mended, run(3, "cpu", failed=("cpu/test_lora",))])
    elsewhere = [broken, run(2, "cpu", device="L4")]
    assert versions.proven("0.31.0", "LoRA", elsewhere) == {
        "CPU (aarch64)": "fails",
        "L4 (aarch64)": "2026-11-02",
    }


def test_suite_counts_for_its_files_and_is_no_tier() -> None:
    short = [run(1, "suite short")]
    assert versions.is_proven("0.31.0", "direct egress", short)
    assert not versions.is_proven("0.31.0", "sleep", short)
    contract = run(1, "suite contract", failed=("contract/test_vllm",))
    assert versions.proven("0.31.0", versions.CONTRACT, [contract]) == {"CPU (aarch64)": "fails"}
    assert versions.proven("0.31.0", versions.CONTRACT, [contract, run(2, "contract")]) == {
        "CPU (aarch64)": "2026-11-02"
    }


@pytest.mark.parametrize("parts", [0, 1, 2])
def test_module_lists_what_is_left(parts: int) -> None:
    files = [file for what in (*EVERYTHING, *ON_GPU)[parts:] for file in versions.SHOWN_BY[what]]
    text = versions.module([run(1, *files)])
    (made,) = (node for node in ast.parse(text).body if isinstance(node, ast.AnnAssign))
    assert made.value is not None
    found = ast.literal_eval(made.value)
    assert found[0, 31] == EVERYTHING[:parts] and found[0, 32] == (*EVERYTHING, *ON_GPU)
    assert found.keys() == NOT_PROVEN.keys()


def test_what_does_not_exist_is_refused() -> None:
    entry = '[[run]]\nvllm = "0.31.0"\nmachine = "x86_64"\ndevice = "CPU"\ndate = 2026-11-17\n'
    for line, told in {
        'ran = ["cpu/test_nothing"]': "no tier, suite or file called 'cpu/test_nothing'",
        'ran = ["suite nothing"]': "no tier, suite or file called 'suite nothing'",
        'ran = ["cpu"]\nfailed = ["test_lora"]': "called 'test_lora'",
    }.items():
        with pytest.raises(SystemExit, match=told):
            versions.read(entry + line)


def test_omni_is_only_for_its_own_vllm() -> None:
    row = next(line for line in versions.capabilities([]) if line.startswith(f"| {versions.OMNI}"))
    others = [version for version in setup_packages.versions() if not version.startswith("0.30.")]
    assert row.count("not for this version") == len(others) and "| not run |" in row
