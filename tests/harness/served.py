"""`dynamo-vllm serve`, started and spoken to over HTTP, for tests and scripts."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness import processes
from harness.processes import COMMAND, STOP_SECONDS, Started, command_line
from harness.stack import Stack, environment
from harness.waiting import until

_READY = re.compile(r"^ready: .* model=(\S+) workers=\d+$", re.MULTILINE)


@dataclass
class Serving:
    process: Started
    stack: Stack
    first_token_seconds: Sequence[float] = ()
    """Of chats one after the other; the first began when the ready line was there."""

    @property
    def output(self) -> Path:
        return self.process.log

    @property
    def url(self) -> str:
        return self.stack.url

    @property
    def ready_line(self) -> str:
        found = _READY.search(self.process.written())
        return found[0] if found else ""

    @property
    def models(self) -> list[str]:
        """Those of the ready line."""
        found = _READY.search(self.process.written())
        return [name.partition("(")[0] for name in found[1].split(",")] if found else []

    def wait_ready(self, seconds: float = 300, every: float = 0.1) -> str:
        """The ready line; raises StartFailed with what it wrote instead, and nothing of it is left."""
        try:
            return processes.wait_until("ready", [self.process], lambda: self.ready_line, seconds, every)
        except processes.StartFailed:
            self.process.kill()
            raise

    def below(self) -> list[psutil.Process]:
        return self.process.below()

    def lasting(self) -> list[psutil.Process]:
        """`serve` and all below it, but not what the console starts for one look at the caches of workers."""
        found = [psutil.Process(self.process.pid)]
        for process in self.below():
            with contextlib.suppress(psutil.NoSuchProcess):
                if not _is_console(process.parent()):
                    found.append(process)
        return found

    def engine_core(self) -> psutil.Process:
        return self.called("EngineCore")

    def called(self, title: str) -> psutil.Process:
        """The one process below `serve` whose command line says this."""
        (found,) = [p for p in self.below() if title in " ".join(command_line(p))]
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

    def stop(self, number: int = signal.SIGINT, seconds: float = STOP_SECONDS) -> list[str]:
        """Ends it as its user does; says what did not end."""
        return self.process.stop(number, seconds)


def start(
    folder: Path,
    *words: str,
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str] | None = None,
) -> Serving:
    """`serve` with these words on a free port; without `env` with nothing of the caller's settings."""
    made = Stack(folder)
    env = env if env is not None else own_environment(folder)
    whole = [*command, "serve", *words, "--port", str(made.port)]
    return Serving(processes.start("serve", whole, folder / "serve.out", env), made)


def _is_console(process: psutil.Process | None) -> bool:
    return process is not None and "console" in process.cmdline()


@contextlib.contextmanager
def served(
    folder: Path,
    *words: str,
    command: Sequence[str] = COMMAND,
    env: Mapping[str, str] | None = None,
    seconds: float = 200,
) -> Iterator[Serving]:
    """The same, ready; killed at the end."""
    running = start(folder, *words, command=command, env=env)
    assert running.stack.openai  # made now, to measure nothing of it
    try:
        running.wait_ready(seconds, every=0.2)
        yield running
    finally:
        running.process.kill()
        running.stack.openai.close()


def own_environment(folder: Path) -> dict[str, str]:
    env = environment(folder, XDG_CACHE_HOME=str(folder / "cache"))
    del env["DYN_FILE_KV"]
    return env
