"""Calls functions in children of the zygote, and reads their answers."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.forks import Forked
from harness.stack import environment
from harness.warm import FORKED, Zygote


@dataclass
class Child:
    process: Forked
    folder: Path

    def answer(self, seconds: float = 300) -> Any:
        assert self.process.wait(seconds) == 0, self.log[-3000:]
        return json.loads((self.folder / "answer.json").read_text())

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@dataclass
class Children:
    warm: Zygote
    folders: pytest.TempPathFactory

    def start(self, call: str, *args: Any, **more: Any) -> Child:
        """`call` is `module:function`, of `cpu`, which may be a coroutine."""
        folder = self.folders.mktemp("child")
        task = [call, args, more, str(folder / "answer.json")]
        process = self.warm.fork("cpu.children:run", task, environment(folder, **FORKED), folder / "log")
        return Child(process, folder)

    def ask(self, call: str, *args: Any, **more: Any) -> Any:
        return self.start(call, *args, **more).answer()


def run(call: str, args: Sequence[Any], more: dict[str, Any], out_file: str) -> None:
    module, _, name = call.partition(":")
    answer = getattr(importlib.import_module(f"cpu.{module}"), name)(*args, **more)
    if inspect.iscoroutine(answer):
        answer = asyncio.run(answer)
    Path(out_file).write_text(json.dumps(answer))
