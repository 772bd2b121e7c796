"""Tests what vLLM needs of the machine, and that only pipelines load the plugin of vLLM-Omni."""

from __future__ import annotations

from importlib import metadata

import pytest

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.errors import StartError

OMNI = {
    "vllm.general_plugins": ("dynamo_vllm", "vllm_omni_register_models"),
    "vllm.platform_plugins": ("other",),
    "vllm_omni.platform_plugins": ("cpu",),
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    def entry_points(*, group: str) -> metadata.EntryPoints:
        names = request.param.get(group, ())
        return metadata.EntryPoints(metadata.EntryPoint(name, "m:f", group) for name in names)

    monkeypatch.setattr(metadata, "entry_points", entry_points)


@pytest.mark.parametrize("installed", [OMNI], indirect=True)
def test_a_pipeline_loads_everything(installed: None) -> None:
    assert vllm_environment.plugins(with_omni=True) == [
        "cpu",
        "dynamo_vllm",
        "other",
        "vllm_omni_register_models",
    ]


@pytest.mark.parametrize("installed", [OMNI], indirect=True)
def test_other_workers_load_everything_else(installed: None) -> None:
    assert vllm_environment.plugins(with_omni=False) == ["cpu", "dynamo_vllm", "other"]


@pytest.mark.parametrize("installed", [{"vllm.general_plugins": ("dynamo_vllm",)}], indirect=True)
@pytest.mark.parametrize("with_omni", [False, True])
def test_without_vllm_omni_nothing_is_restricted(installed: None, with_omni: bool) -> None:
    assert vllm_environment.plugins(with_omni=with_omni) is None


def test_missing_library_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine, "device", lambda: "cpu")
    with pytest.raises(StartError, match=r"libnuma\.so\.1.*apt install libnuma1"):
        machine.refuse_missing_library(load)
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    machine.refuse_missing_library(load)
