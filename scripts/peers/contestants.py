"""Starts and measures what takes part: servers behind HTTP, and the bare engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from harness.processes import Started, StartFailed
from peers import bare, load, observe, peers
from peers.environments import Environments
from peers.settings import MODEL_NAME, Setting, Stage

BARE = "bare"
BARE_TITLE = "bare AsyncLLM, client inside"
SCRIPTS = Path(__file__).parents[1]
QUESTIONS = tuple([first, *range(first % 100 + 120, first % 100 + 160)] for first in (300, 431, 777))
QUESTION_TOKENS = 24
IDLE_SECONDS = 2.0


class Contestant(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def main(self) -> str: ...
    @property
    def roots(self) -> tuple[str, ...]: ...
    @property
    def commands(self) -> Sequence[str]: ...
    @property
    def start_seconds(self) -> float: ...
    @property
    def watched(self) -> Mapping[str, int]: ...
    def answers(self) -> list[str]: ...
    def measure(self, stage: Stage, seed: int) -> dict[str, Any]: ...
    def idle_cores(self) -> float: ...
    def stop(self) -> None: ...


class Served:
    """A peer behind HTTP."""

    def __init__(self, server: peers.Server, clients: int | None) -> None:
        self._server = server
        self._clients = clients
        self.name, self.title, self.main = server.peer.name, server.peer.title, server.peer.main
        self.roots = tuple(part.name for part in server.parts)
        self.commands = server.commands
        self.start_seconds = server.start_seconds
        self.watched = server.watched
        self.url = server.url

    def answers(self) -> list[str]:
        texts = []
        for prompt in QUESTIONS:
            body = {
                "model": MODEL_NAME,
                "prompt": prompt,
                "max_tokens": QUESTION_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            answer = observe.ask(f"{self.url}/v1/completions", body)
            texts.append(str(answer["choices"][0]["text"]) if answer else "no answer")
        return texts

    def measure(self, stage: Stage, seed: int) -> dict[str, Any]:
        return load.run(self.url, stage, seed, self.watched, self._clients)

    def idle_cores(self) -> float:
        return observe.cpu_share(self._server.parts, IDLE_SECONDS)

    def stop(self) -> None:
        self._server.stop()


class BareEngine:
    """`peers.bare` in a process that gets one stage after the other."""

    name, title, main, roots = BARE, BARE_TITLE, bare.LABEL, (bare.LABEL,)

    def __init__(self, setting: Setting, folder: Path) -> None:
        began = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["--model", str(setting.model), *setting.flags]
        path = os.pathsep.join(filter(None, [str(SCRIPTS), os.environ.get("PYTHONPATH")]))
        env = setting.environment() | peers.NO_PLUGINS | {"PYTHONPATH": path}
        command = [sys.executable, "-m", "peers.bare", "--serve", *flags]
        with (folder / "bare.log").open("wb") as log:
            popen = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        self._process = Started(BARE, popen, folder / "bare.log")
        self.commands = [peers.show(peers.Part(BARE, tuple(command)))]
        self.watched = {BARE: popen.pid}
        try:
            self._ask({"prompts": [list(QUESTIONS[0])], "max_tokens": 1})
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began

    def _ask(self, value: Mapping[str, Any]) -> Any:
        popen = self._process.popen
        assert popen.stdin and popen.stdout
        with contextlib.suppress(BrokenPipeError):  # it has ended; what it wrote last says why
            popen.stdin.write(json.dumps(value).encode() + b"\n")
            popen.stdin.flush()
        if not (answer := popen.stdout.readline()):
            raise StartFailed(f"bare AsyncLLM ended, see {self._process.log}\n{self._process.last_lines()}")
        return json.loads(answer)

    def answers(self) -> list[str]:
        asked = {"prompts": [list(prompt) for prompt in QUESTIONS], "max_tokens": QUESTION_TOKENS}
        return [str(text) for text in self._ask(asked)]

    def measure(self, stage: Stage, seed: int) -> dict[str, Any]:
        return dict(self._ask(bare.order(stage, seed)))

    def idle_cores(self) -> float:
        return observe.cpu_share([self._process], IDLE_SECONDS)

    def stop(self) -> None:
        self._process.stop(seconds=peers.STOP_SECONDS)
        for pipe in (self._process.popen.stdin, self._process.popen.stdout):
            if pipe:
                pipe.close()


@dataclass(frozen=True)
class Starter:
    """Starts contestants of one setting."""

    setting: Setting
    environments: Environments
    folder: Path
    clients: int | None = None

    def start(self, name: str) -> Contestant:
        """Start a contestant; raises NotHere or StartFailed with the reason."""
        folder = self.folder / name
        if name == BARE:
            return BareEngine(self.setting, folder)
        return Served(peers.start(peers.PEERS[name], self.setting, self.environments, folder), self.clients)


def titles() -> dict[str, str]:
    return {BARE: BARE_TITLE, **{name: peer.title for name, peer in peers.PEERS.items()}}
