"""Processes with routes of the gateway in front of a deployment, and clients of them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from harness import processes
from harness.processes import Started, free_port
from harness.stack import environment
from harness.waiting import until

if TYPE_CHECKING:
    import openai


@dataclass
class Gateway:
    """A process that can be killed and started again in the same folder."""

    frontend: str
    folder: Path
    settings: dict[str, Any]
    port: int = field(default_factory=free_port)
    process: Started | None = None
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Gateway:
        settings = {"frontend": self.frontend, "folder": str(self.folder), "port": self.port}
        words = [sys.executable, "-m", "harness.gateway_app", json.dumps(settings | self.settings)]
        env = environment(self.folder) | {"PYTHONPATH": ":".join(sys.path)}
        self.process = processes.start("gateway", words, self.folder / "gateway.log", env)
        processes.wait_until("gateway ready", [self.process], self.is_ready, 60, 0.02)
        return self

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/v1/responses/none", timeout=5).status_code == 404
        except httpx.TransportError:
            return False

    def client(self, tenant: str = "a", **headers: str) -> openai.OpenAI:
        import openai

        made = openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            default_headers={"x-gateway-tenant": tenant, "x-gateway-key": f"key-{tenant}", **headers},
        )
        self.clients.append(made)
        return made

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            until("gateway gone", lambda: self.process is None or self.process.poll() is not None)


@contextlib.contextmanager
def gateway(frontend: str, folder: Path, **settings: Any) -> Iterator[Gateway]:
    made = Gateway(frontend, folder, settings)
    try:
        yield made.start()
    finally:
        for client in made.clients:
            client.close()
        made.kill()
