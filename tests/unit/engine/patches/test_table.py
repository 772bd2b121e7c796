"""Tests the table of patches: what is applied where, by version and device, and what is logged."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dynamo_vllm.engine.patches import cpu_worker, patch, table
from dynamo_vllm.engine.patches.patch import Patch, State, Where


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulates a process without patches, with vLLM 0.30 for CPU."""
    monkeypatch.setattr(table, "_applied", set())
    monkeypatch.setattr(table, "_warned", set())
    monkeypatch.setattr(patch, "installed", {"vllm": "0.30.0", "odd": "unknown"}.get)
    monkeypatch.setattr(table, "installed", {"vllm": "0.30.0", "odd": "unknown"}.get)
    monkeypatch.setattr(patch, "_device", lambda: "cpu")


def made(calls: list[str], **about: object) -> Patch:
    name = str(about.setdefault("name", "fix"))
    plain: dict[str, object] = {
        "targets": ("vllm.thing",),
        "package": "vllm",
        "versions": ">=0.30,<0.31",
        "defect": "it is broken",
        "where": (Where.WORKER,),
        "apply": lambda: calls.append(name),
        "still_needed": lambda: True,
    }
    return Patch(**plain | about)  # type: ignore[arg-type]


def test_patches_of_this_process_are_applied_once_and_in_order() -> None:
    calls: list[str] = []
    patches = [
        made(calls, name="b"),
        made(calls, name="a"),
        made(calls, name="c", where=(Where.ENGINE, Where.GUIDE_CHECKER)),
    ]
    table.apply(Where.WORKER, patches)
    table.apply(Where.WORKER, patches)
    assert calls == ["b", "a"]
    table.apply(Where.GUIDE_CHECKER, patches)
    assert calls == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("about", "state"),
    [
        ({}, State.APPLIED),
        ({"device": "cpu"}, State.APPLIED),
        ({"device": "cuda"}, State.OTHER_DEVICE),
        ({"versions": ">=0.29,<0.30"}, State.OTHER_VERSION),
        ({"versions": ">=0.31"}, State.OTHER_VERSION),
        ({"package": "odd"}, State.OTHER_VERSION),
        ({"package": "nixl"}, State.NOT_INSTALLED),
    ],
)
def test_patch_is_applied_by_version_and_device(about: dict[str, object], state: State) -> None:
    calls: list[str] = []
    one = made(calls, **about)
    table.apply(Where.WORKER, [one])
    assert one.state() is state
    assert calls == (["fix"] if state is State.APPLIED else [])


@pytest.mark.parametrize(
    ("version", "state"),
    [
        *((build, State.APPLIED) for build in ("0.30.0", "0.30.2", "0.30.1.dev3+gabc", "0.30.0+cpu")),
        *((other, State.OTHER_VERSION) for other in ("0.29.1", "0.31.0", "0.31.0rc1")),
    ],
)
def test_builds_of_a_version_count_as_the_version(
    monkeypatch: pytest.MonkeyPatch, version: str, state: State
) -> None:
    monkeypatch.setattr(patch, "installed", {"vllm": version}.get)
    assert made([]).state() is state


def test_an_unsupported_version_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(patch, "installed", {"vllm": "0.33.0"}.get)
    monkeypatch.setattr(table, "installed", {"vllm": "0.33.0"}.get)
    patches = [made([], versions="<0.33"), made([], name="gone", package="nixl")]
    with caplog.at_level(logging.INFO):
        table.apply(Where.WORKER, patches)
        table.apply(Where.WORKER, patches)
        monkeypatch.setattr(patch, "installed", {"vllm": "0.30.0"}.get)
        monkeypatch.setattr(table, "installed", {"vllm": "0.30.0"}.get)
        table.apply(Where.WORKER, [made([], name="not needed", versions=">=0.31,<0.33")])
    assert caplog.messages == ["fix is not applied: it is for <0.33, and vllm 0.33.0 is installed"]


def test_condition_is_evaluated_at_each_apply() -> None:
    calls: list[str] = []
    asked = [False, True]
    patches = [made(calls, only_if=lambda: asked.pop(0))]
    table.apply(Where.WORKER, patches)
    assert calls == []
    table.apply(Where.WORKER, patches)
    assert calls == ["fix"]


def test_wrapping_twice_is_wrapping_once() -> None:
    def louder(say: object) -> object:
        return lambda: say() + "!"  # type: ignore[operator]

    def politer(say: object) -> object:
        return lambda: "please " + say()  # type: ignore[operator]

    owner = SimpleNamespace(say=lambda: "go")
    for make in (louder, politer, louder, politer):
        patch.wrap(owner, "say", make)
    assert owner.say() == "please go!"


def test_names_are_unique_and_every_place_has_patches() -> None:
    names = [one.name for one in table.PATCHES]
    assert len(set(names)) == len(names)
    assert {where for one in table.PATCHES for where in one.where} == set(Where)


def test_extension_of_cpu_workers_applies_when_it_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Where] = []
    monkeypatch.setattr(table, "apply", asked.append)
    assert cpu_worker.CpuWorkerExtension.__name__ == cpu_worker.EXTENSION
    assert asked == [Where.CPU_WORKER]
    with pytest.raises(AttributeError):
        cpu_worker.Other  # noqa: B018


def test_table_imports_nothing_that_it_patches() -> None:
    packages = "{'vllm', 'torch', 'numpy', 'nixl', 'xgrammar', 'prometheus_client', 'vllm_omni'}"
    program = (
        "import sys\n"
        "from dynamo_vllm.engine.patches import cpu_worker, plugin, table\n"
        "[one.state() for one in table.PATCHES]\n"
        f"print(sorted({packages} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
