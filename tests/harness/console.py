"""`serve` with the fake engine and its web console, for tests in a browser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from harness import processes
from harness.processes import COMMAND, free_port
from harness.served import Serving, own_environment, served
from harness.waiting import until


@dataclass
class RealConsole:
    """A console of a running `serve`."""

    url: str
    serving: Serving
    env: Mapping[str, str]

    def get(self, path: str) -> Any:
        answer = httpx.get(self.url + path, timeout=30)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def workers(self, state: str = "ready") -> list[dict[str, Any]]:
        return [one for one in self.get("api/overview")["workers"] if one["state"] == state]

    def wait_for_workers(self, count: int) -> None:
        until(f"{count} workers", lambda: len(self.workers()) == count)

    def ask(self, model: str, text: str, max_tokens: int = 8) -> None:
        body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens}
        answer = self.serving.stack.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text

    @contextlib.contextmanager
    def another(self, folder: Path, *words: str) -> Iterator[str]:
        """Start one more console of the same deployment; return its URL."""
        url = f"http://127.0.0.1:{free_port()}/"
        port = url.rstrip("/").rpartition(":")[2]
        command = [*COMMAND, "console", "--url", self.serving.url, "--console-port", port, *words]
        started = processes.start("console", command, folder / "console.log", self.env)
        try:
            processes.wait_until("the console", [started], lambda: is_open(url))
            yield url
        finally:
            started.kill()


def is_open(url: str) -> bool:
    try:
        return httpx.get(f"{url}live", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def console(
    folder: Path, *words: str, groups: list[dict[str, Any]] | None = None, **env: str
) -> Iterator[RealConsole]:
    """Start `serve` with these groups of workers and wait until the console has seen them."""
    file = folder / "serve.json"
    file.write_text(json.dumps({"workers": groups or []}))
    settings = {**own_environment(folder), "DYN_VLLM_CONSOLE": "1", **env}
    port = free_port()
    whole = (*words, "--config", str(file), "--console-port", str(port))
    with served(folder, *whole, env=settings) as running:
        url = f"http://127.0.0.1:{port}/"
        until("the console's line", lambda: f"console: {url}\n" in running.process.written())
        yield RealConsole(url, running, settings)


Start = Callable[..., RealConsole]
