"""`dynamo-vllm serve --gateway` for many tests: Envoy, control app, frontend and workers."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.database import Database, default_url
from harness import served
from harness.processes import COMMAND, command_line
from harness.served import Serving
from harness.waiting import until

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

KEY = "sk-key-of-the-gateway-tests"
FAKE = ("--engine", "fake")
LONG_CONTEXT, DEMO_VOCABULARY = 131072, 2048
_RUN_FOLDER = re.compile(r"; logs in (\S+)/logs$", re.MULTILINE)


@dataclass
class Gateway:
    """A running deployment behind a gateway; it has its own home, so it shares keys with nobody."""

    serving: Serving
    env: Mapping[str, str]
    key: str = KEY

    @property
    def url(self) -> str:
        """Of Envoy, without /v1."""
        return self.serving.url

    @property
    def folder(self) -> Path:
        return self.serving.stack.folder

    @property
    def run_folder(self) -> Path:
        """Return the folder with logs and discovery of this run."""
        found = _RUN_FOLDER.search(self.serving.process.written())
        assert found, self.serving.process.last_lines()
        return Path(found[1])

    def log(self, name: str) -> str:
        """Return the log of one process: "envoy", "gateway", "frontend", "worker-1"."""
        return (self.run_folder / "logs" / f"{name}.log").read_text(errors="replace")

    # --- processes ---

    @property
    def envoy(self) -> psutil.Process:
        """The program itself; its parent is ours and watches it."""
        (found,) = [p for p in self.serving.below() if _is_envoy(p)]
        return found

    @property
    def control(self) -> psutil.Process:
        return self.serving.called("--part=control")

    @property
    def frontend(self) -> psutil.Process:
        return self._command("frontend")[0]

    @property
    def workers(self) -> list[psutil.Process]:
        return self._command("worker")

    def _command(self, name: str) -> list[psutil.Process]:
        return [p for p in self.serving.below() if _is_command(p, name)]

    @property
    def frontend_url(self) -> str:
        """Of the frontend behind the gateway, which asks for no key."""
        words = " ".join(self.frontend.cmdline())
        found = re.search(r"--port=(\d+)", words)
        assert found, words
        return f"http://127.0.0.1:{found[1]}"

    # --- keys ---

    def run(self, *words: str) -> str:
        """Return what a command of ours prints that shares the gateway's database."""
        done = subprocess.run([*COMMAND, *words], env=self.env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def create_key(self, name: str, *words: str) -> str:
        """Return the secret of a new key that the gateway already knows."""
        secret: str = json.loads(self.run("keys", "create", name, *words, "--json"))["secret"]
        with self.client(key=secret) as client:
            until(f"key {name}", lambda: client.get("/v1/models").status_code != 401)
        return secret

    @contextlib.contextmanager
    def database(self) -> Iterator[Database]:
        """Open the gateway's database beside it."""
        opened = Database(default_url(self.env), schema.ALL)
        try:
            yield opened
        finally:
            opened.close()

    # --- clients; who makes one closes it ---

    def client(self, key: str | None = None, timeout: float = 60.0, **more: Any) -> httpx.Client:
        """Return a client with this key; an empty one sends none."""
        said = {"authorization": f"Bearer {self.key if key is None else key}"} if key != "" else {}
        return httpx.Client(base_url=self.url, headers=said, timeout=timeout, **more)

    @functools.cached_property
    def http(self) -> httpx.Client:
        """A client that is closed with the gateway."""
        return self.client()

    def openai(self, key: str | None = None, **more: Any) -> OpenAI:
        import openai

        return openai.OpenAI(**self._sdk(f"{self.url}/v1", key, more))

    def anthropic(self, key: str | None = None, **more: Any) -> Anthropic:
        import anthropic

        return anthropic.Anthropic(**self._sdk(self.url, key, more))

    def _sdk(self, base_url: str, key: str | None, more: dict[str, Any]) -> dict[str, Any]:
        return {"base_url": base_url, "api_key": key or self.key, "max_retries": 0, "timeout": 60} | more

    def close(self) -> None:
        if "http" in self.__dict__:
            self.http.close()
        self.serving.process.kill()


def _is_envoy(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name() == "envoy"
    return False


def _is_command(process: psutil.Process, name: str) -> bool:
    """Return whether a process runs `dynamo-vllm NAME`, started afresh or forked and renamed."""
    line = " ".join(command_line(process))
    return line.startswith(f"dynamo-vllm {name}") or f"dynamo_vllm.cli.main {name} " in line


def own_environment(folder: Path, key: str = KEY, **more: str) -> dict[str, str]:
    """A home of its own, and nothing of the caller's settings."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    places = {"HOME": str(home), "XDG_DATA_HOME": str(home / "data"), "XDG_CACHE_HOME": str(home / "cache")}
    return served.own_environment(folder) | places | {"VLLM_API_KEY": key} | more


@contextlib.contextmanager
def gateway(
    folder: Path, *words: str, key: str = KEY, seconds: float = 200.0, **env: str
) -> Iterator[Gateway]:
    """Yield `serve --gateway` with these words, ready; everything of it is ended afterwards."""
    whole = own_environment(folder, key, **env)
    made = Gateway(served.start(folder, "--gateway", *words, env=whole), whole, key)
    try:
        made.serving.wait_ready(seconds)
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def fake_gateway(folder: Path, *words: str, key: str = KEY, **spec: Any) -> Iterator[Gateway]:
    """Yield the same with the fake engine, which has this context: `fake_gateway(folder, token_ms=5)`."""
    described = json.dumps({"context_length": LONG_CONTEXT, "vocab_size": DEMO_VOCABULARY, **spec})
    with gateway(folder, *FAKE, "--fake-engine", described, *words, key=key) as made:
        yield made
