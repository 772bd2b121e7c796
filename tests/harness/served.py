"""`dynamo-vllm serve` with its demo model, ready, for tests that speak to it over HTTP."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.stack import COMMAND, Stack, environment, free_port, kill_tree
from harness.waiting import until


@dataclass
class Serving:
    process: subprocess.Popen[bytes]
    stack: Stack
    output: Path
    first_token_seconds: float = 0.0
    """Of the first chat, begun when the ready line was there."""

    @property
    def ready_line(self) -> str:
        lines = [line for line in self.output.read_text().splitlines() if line.startswith("ready: ")]
        return lines[0] if lines else ""

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine_core(self) -> psutil.Process:
        return self.called("EngineCore")

    def called(self, title: str) -> psutil.Process:
        """The one process below `serve` whose command line says this."""
        (found,) = [p for p in self.below() if title in " ".join(p.cmdline())]
        return found

    def came_back(self) -> None:
        until("the model to come back", lambda: self.stack.get("/health").status_code == 200, 150, every=0.2)
        answer = self.stack.openai.completions.create(model="demo-chat", prompt="hello", max_tokens=3)
        assert answer.choices[0].text

    def chat(self, text: str, **more: Any) -> Any:
        create: Any = self.stack.openai.chat.completions.create
        return create(
            model="demo-chat", messages=[{"role": "user", "content": text}], **{"max_tokens": 150, **more}
        )


@contextlib.contextmanager
def served(
    folder: Path,
    *words: str,
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str] | None = None,
    seconds: float = 200,
) -> Iterator[Serving]:
    """`serve` with these words, ready."""
    made = Stack(folder, port=free_port())
    output = folder / "serve.out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            [*command, "serve", "--port", str(made.port), *words],
            env=env if env is not None else own_environment(folder),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    running = Serving(process, made, output)
    assert made.openai  # made now, to measure nothing of it
    try:
        until("the ready line", lambda: running.ready_line or process.poll() is not None, seconds, every=0.2)
        assert running.ready_line, output.read_text()
        yield running
    finally:
        kill_tree(process.pid)
        process.wait(30)
        made.openai.close()


def own_environment(folder: Path) -> dict[str, str]:
    env = environment(folder, XDG_CACHE_HOME=str(folder / "cache"))
    del env["DYN_FILE_KV"]
    return env
