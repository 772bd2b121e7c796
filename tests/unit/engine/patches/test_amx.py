"""Tests that a worker on CPU asks for AMX registers before it uses its device; without vLLM."""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from dynamo_vllm.engine.patches.cpu import amx


@pytest.mark.parametrize(
    ("is_there", "is_given", "asked", "warnings"),
    [(False, False, 0, 0), (True, True, 1, 0), (True, False, 1, 1)],
)
def test_registers_are_asked_for_where_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    is_there: bool,
    is_given: bool,
    asked: int,
    warnings: int,
) -> None:
    order: list[str] = []

    def ask() -> bool:
        order.append("asked")
        return is_given

    cpu = SimpleNamespace(_is_amx_tile_supported=lambda: is_there, _init_amx=ask)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cpu=cpu))
    with caplog.at_level(logging.WARNING):
        assert amx._with_registers(lambda worker: order.append("device"))(None) is None
    assert order == ["asked"] * asked + ["device"]
    assert len(caplog.records) == warnings
