"""What was run with which vLLM: what follows from it for the page and for warnings."""

from __future__ import annotations

from datetime import date

import pytest
from generate import versions
from generate.versions import Run

from dynamo_vllm.engine.vllm.compat.versions import EVERYTHING, ON_GPU


def run(day: int, *ran: str, failed: tuple[str, ...] = (), device: str = "CPU", vllm: str = "0.31.0") -> Run:
    return Run(vllm, "aarch64", device, ran, date(2026, 11, day), failed)


def test_page_and_warnings_are_what_the_runs_say() -> None:
    assert versions.main(["--check"]) == 0, "run 'make docs'"


def test_every_part_that_is_warned_of_is_shown_by_something() -> None:
    names = [*versions.SHOWN_BY]
    assert [name for name in names if name in (*EVERYTHING, *ON_GPU)] == [*EVERYTHING, *ON_GPU]
    assert set(names) - {*EVERYTHING, *ON_GPU} == {versions.OMNI, versions.CONTRACT}
    assert all(versions._exists(file) for files in versions.SHOWN_BY.values() for file in files)


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


def test_what_does_not_exist_is_refused() -> None:
    entry = '[[run]]\nvllm = "0.31.0"\nmachine = "x86_64"\ndevice = "CPU"\ndate = 2026-11-17\n'
    for line, told in {
        'ran = ["cpu/test_nothing"]': "no tier, suite or file called 'cpu/test_nothing'",
        'ran = ["suite nothing"]': "no tier, suite or file called 'suite nothing'",
        'ran = ["cpu"]\nfailed = ["test_lora"]': "called 'test_lora'",
    }.items():
        with pytest.raises(SystemExit, match=told):
            versions.read(entry + line)
