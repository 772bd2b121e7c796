"""Tests what our CPU patches rely on in vLLM and torch, and the number of an engine's threads."""

from __future__ import annotations

import inspect
import os
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import vllm
from vllm.utils import cpu_resource_utils

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.patches.cpu import compiling, topology
from dynamo_vllm.engine.process import cpu_threads
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.models.tiny import make_tiny_model
from harness.settings import with_flags

pytestmark = pytest.mark.skipif(machine.device() != "cpu", reason="patches for CPU")


def source(path: str) -> str:
    return (Path(inspect.getfile(vllm)).parent / path).read_text()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(autouse=True)
def threads_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that what resolve sets is taken back
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)


def test_vllm_compiles_a_model_in_its_warm_up_and_leaves_out_what_says_so() -> None:
    text = source("v1/worker/cpu_model_runner.py")
    assert "def warming_up_model(self) -> None:" in text and "self.profile_run()" in text
    assert "if self.do_not_compile or torch.compiler.is_compiling():" in source("compilation/decorators.py")


@pytest.mark.parametrize("stance", [compiling.EAGER, compiling.COMPILED])
def test_torch_compiles_nothing_in_these_stances(stance: str) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("compiled")

    doubled = torch.compile(lambda x: x + x, backend=refused)
    with torch.compiler.set_stance(stance):
        assert doubled(torch.ones(1)).tolist() == [2.0]
    with torch.compiler.set_stance("default"), pytest.raises(Exception, match="compiled"):
        doubled(torch.ones(1))


def test_a_core_has_the_numbers_that_we_read() -> None:
    assert list(inspect.signature(cpu_resource_utils.LogicalCPUInfo).parameters) == [
        "id",
        "physical_core",
        "numa_node",
    ]


@pytest.mark.skipif(shutil.which("lscpu") is None, reason="compares with lscpu")
def test_cores_are_those_of_lscpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cpu_resource_utils._get_cpu_list()
    monkeypatch.setattr(cpu_resource_utils, "_get_cpu_list", None)
    topology.apply()
    read = cpu_resource_utils._get_cpu_list()
    assert [(core.id, core.numa_node) for core in read] == [(core.id, core.numa_node) for core in asked]
    assert siblings(read) == siblings(asked)


def siblings(cores: list[cpu_resource_utils.LogicalCPUInfo]) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for core in cores:
        found[core.physical_core].append(core.id)
    return sorted(found.values())


@pytest.mark.parametrize(("argv", "engines"), [((), 1), (("-dp", "2"), 2), (("-tp", "2"), 2)])
def test_engine_core_gets_its_part_of_the_cores(
    model: str, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], engines: int
) -> None:
    monkeypatch.setattr(cpu_threads, "usable_cores", lambda: 9)
    fired = vllm_arguments.resolve(with_flags(EngineSettings(model=model), *argv)).fired
    (threads,) = [f for f in fired if f.argument == "OMP_NUM_THREADS"]
    assert threads.value == 8 // engines
    assert os.environ["OMP_NUM_THREADS"] == str(8 // engines)


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"])
def test_threads_that_the_user_chose_stand(model: str, name: str) -> None:
    fired = vllm_arguments.resolve(EngineSettings(model=model, environment={name: "5"})).fired
    assert not [f for f in fired if f.argument == "OMP_NUM_THREADS"]
    assert os.environ["OMP_NUM_THREADS"] == "1"


@pytest.mark.parametrize(
    ("argv", "phase"),
    [
        ((), "loading"),
        (("--no-enforce-eager",), "loading and compiling"),
        (("--compilation-config", '{"mode": 3}'), "loading and compiling"),
    ],
)
def test_a_model_is_compiled_where_the_user_says_so_and_nowhere_else(
    model: str, argv: tuple[str, ...], phase: str
) -> None:
    settings = EngineSettings(model=model, argv=argv)
    config = vllm_arguments.create_config(vllm_arguments.resolve(settings).args, settings)
    assert vllm_arguments.loading_phase(config) == phase
