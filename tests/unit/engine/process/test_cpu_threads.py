"""Tests which cores a CPU engine may use, how its threads wait, and the list of cores without lscpu."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from dynamo_vllm.engine.patches.cpu import topology
from dynamo_vllm.engine.process import cpu_threads

PASSIVE = {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"}


def written(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")
    return folder


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/", {"cpu.max": "250000 100000"}, 2),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/", {"cpu.max": "9900000 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/seen/outside", {"cpu.max": "200000 100000"}, 2),
        ("3:cpu,cpuacct:/a", {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000"}, 8),
        (
            "4:memory:/b\n3:cpu,cpuacct:/a",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "400000", "cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("3:cpu:/a", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3),
        ("3:cpu:/a", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (None, {"cpu.max": "200000 100000"}, 2),
    ],
)
def test_a_quota_of_the_process_or_around_it_limits_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    groups = written(tmp_path / "cgroup", files)
    if own is not None:
        written(tmp_path, {"own": own})
    assert cpu_threads.usable_cores(str(groups), str(tmp_path / "own")) == cores


def test_affinity_limits_the_cores(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert cpu_threads.usable_cores(str(tmp_path), str(tmp_path / "none")) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("environment", "set_by_us"),
    [
        ({}, PASSIVE),
        ({"OMP_NUM_THREADS": "4"}, PASSIVE),
        ({"OMP_WAIT_POLICY": "active"}, {"KMP_BLOCKTIME": "0"}),
        ({"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, {}),
    ],
)
def test_threads_wait_passively_unless_the_user_says_how(
    environment: dict[str, str], set_by_us: dict[str, str]
) -> None:
    assert cpu_threads.cpu_thread_environment(environment) == set_by_us


@pytest.mark.parametrize(
    ("environment", "chosen"),
    [
        ({}, False),
        ({"OMP_NUM_THREADS": ""}, False),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"VLLM_CPU_OMP_THREADS_BIND": "auto"}, True),
        ({"MKL_NUM_THREADS": "3"}, False),
    ],
)
def test_number_of_threads_is_the_users_where_they_gave_it(environment: dict[str, str], chosen: bool) -> None:
    assert cpu_threads.is_chosen(environment) is chosen


def test_cores_are_listed_with_their_siblings_and_memory_nodes(tmp_path: Path) -> None:
    files = {"cpu/online": "0-2,5", "node/node0/cpulist": "0-1,4-5", "node/node1/cpulist": "2-3"}
    files |= {f"cpu/cpu{number}/topology/thread_siblings_list": "1,5" for number in (1, 5)}
    found = topology.cores(str(written(tmp_path, files)))
    assert found == [(0, 0, 0), (1, 1, 0), (2, 2, 1), (5, 1, 0)]


def test_without_sys_every_core_is_its_own_physical_core(tmp_path: Path) -> None:
    assert topology.cores(str(tmp_path)) == [(n, n, 0) for n in range(os.cpu_count() or 1)]
