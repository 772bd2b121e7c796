"""`dynamo-vllm gateway` in front of a frontend, such as one that echoes, with a database of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.keys import Key
from harness import processes
from harness.echo_frontend import EchoFrontend, echoing
from harness.processes import COMMAND, Started
from harness.stack import environment
from harness.waiting import until

FIXED = "sk-fixed-0123456789abcdef"
CHAT = "/v1/chat/completions"


@dataclass
class Running:
    """A gateway in front of any frontend."""

    process: Started
    url: str
    database: Database
    folder: Path
    client: httpx.Client

    def key(self, name: str = "somebody", **settings: Any) -> tuple[Key, str]:
        """A new key and its secret."""
        return self.database.run_now(keys.create(name, **settings))

    def secret(self, name: str = "somebody", **settings: Any) -> str:
        """The secret of a new key that the gateway knows."""
        _, made = self.key(name, **settings)
        until("the key to be known", lambda: self.get("/v1/models", made).status_code != 401, every=0.05)
        return made

    def ask(
        self,
        secret: str | None = FIXED,
        path: str = CHAT,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        sent = {**({} if secret is None else {"authorization": f"Bearer {secret}"}), **(headers or {})}
        return self.client.post(self.url + path, json={"model": "m", **body}, headers=sent)

    def get(self, path: str, secret: str | None = FIXED) -> httpx.Response:
        return self.client.get(self.url + path, headers={} if secret is None else {"x-api-key": secret})

    def envoy(self) -> psutil.Process:
        (found,) = [process for process in self.process.below() if process.name() == "envoy"]
        return found


@dataclass
class Gateway(Running):
    echo: EchoFrontend


@contextlib.contextmanager
def gateway(folder: Path, *words: str, **variables: str) -> Iterator[Gateway]:
    """A running gateway in front of an echo; its keys are new."""
    with echoing() as echo, in_front_of(echo.url, folder, *words, **variables) as made:
        yield Gateway(made.process, made.url, made.database, made.folder, made.client, echo)


@contextlib.contextmanager
def in_front_of(frontend: str, folder: Path, *words: str, **variables: str) -> Iterator[Running]:
    """A running gateway; its keys are new."""
    port = processes.free_port()
    url = f"sqlite:///{folder / 'gateway.db'}"
    keys_of_all = {} if "--open" in words else {"VLLM_API_KEY": FIXED}
    env = environment(folder, DYN_VLLM_GATEWAY_DATABASE=url, **keys_of_all, **variables)
    is_tls = "--tls-cert-path" in words
    with contextlib.ExitStack() as ends:
        command = [*COMMAND, "gateway", "--port", str(port), "--frontend", frontend, *words]
        process = processes.start("gateway", command, folder / "gateway.log", env)
        ends.callback(process.kill)
        processes.wait_until("ready", [process], lambda: " ready (" in process.written(), 60)
        database = Database(url, schema.ALL)
        ends.callback(database.close)
        client = ends.enter_context(httpx.Client(timeout=60, trust_env=False, verify=False))
        scheme = "https" if is_tls else "http"
        yield Running(process, f"{scheme}://127.0.0.1:{port}", database, folder, client)
