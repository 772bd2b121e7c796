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


@pytest.mark.parametrize(
    ("installed", "with_omni", "loaded"),
    [
        (OMNI, True, ["cpu", "dynamo_vllm", "other", "vllm_omni_register_models"]),
        (OMNI, False, ["cpu", "dynamo_vllm", "other"]),
        *(({"vllm.general_plugins": ("dynamo_vllm",)}, with_omni, None) for with_omni in (False, True)),
    ],
    indirect=["installed"],
)
def test_only_pipelines_load_the_plugins_of_vllm_omni(
    installed: None, with_omni: bool, loaded: list[str] | None
) -> None:
    assert vllm_environment.plugins(with_omni=with_omni) == loaded


def test_missing_library_is_named_with_the_package_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(machine, "device", lambda: "cpu")
    with pytest.raises(StartError, match=r"libnuma\.so\.1.*apt install libnuma1"):
        machine.refuse_missing_library(load)
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    machine.refuse_missing_library(load)
