"""Asks the frontends of a deployment how they are, in few requests."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import httpx
import msgspec

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.gateway.transport import Transport
from dynamo_vllm.observe import frontend_figures
from dynamo_vllm.observe.frontend_figures import FrontendFigures

if TYPE_CHECKING:
    from collections.abc import Sequence

ASK_SECONDS = 4.0
_STREAMED = httpx.Timeout(None, connect=10.0)


@dataclass(frozen=True, slots=True)
class FrontendState:
    """What one frontend said; `problem` says why it said nothing."""

    name: str
    url: str
    models: tuple[str, ...] = ()
    """Those that can answer."""
    figures: FrontendFigures = field(default_factory=FrontendFigures)
    problem: str | None = None

    @property
    def is_ready(self) -> bool:
        return bool(self.models)


class Frontends:
    """Clients of all frontends, and of the deployment's public URL; close them at the end."""

    def __init__(self, urls: Sequence[str], public: str) -> None:
        self._urls = list(urls)
        self._clients = [client(url) for url in urls]
        self.public = client(public)

    async def ask(self) -> list[FrontendState]:
        names = ["frontend", *(f"frontend-{n}" for n in range(2, len(self._urls) + 1))]
        asked = zip(names, self._urls, self._clients, strict=True)
        return list(await asyncio.gather(*(_ask(*one) for one in asked)))

    async def models(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models of the first frontend that lists some."""
        for asked in self._clients:
            try:
                answer = await asked.get("/v1/models", timeout=ASK_SECONDS)
                listed = msgspec.json.decode(answer.content)["data"]
            except (httpx.HTTPError, msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
                continue
            if answer.status_code == 200 and isinstance(listed, list):
                return [entry for entry in listed if isinstance(entry, dict) and "id" in entry]
        return []

    async def close(self) -> None:
        for one in (*self._clients, self.public):
            await one.aclose()


async def _ask(name: str, url: str, asked: httpx.AsyncClient) -> FrontendState:
    try:
        health = await asked.get("/health", timeout=ASK_SECONDS)
        page = await asked.get("/metrics", timeout=ASK_SECONDS)
    except httpx.TimeoutException:
        return FrontendState(name, url, problem=f"it did not answer within {ASK_SECONDS:g} s")
    except httpx.HTTPError as exc:
        return FrontendState(name, url, problem=str(exc) or type(exc).__name__)
    figures = frontend_figures.read(page.content) if page.status_code == 200 else FrontendFigures()
    return FrontendState(name, url, _ready(health), figures)


def _ready(health: httpx.Response) -> tuple[str, ...]:
    """Return the models of our /health; upstream's frontend does not name them."""
    try:
        found = msgspec.json.decode(health.content)
        models = found.get("models") if isinstance(found, dict) else None
        if isinstance(models, list):
            return tuple(map(str, models))
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    return ("?",) if health.status_code == 200 else ()


def client(url: str) -> httpx.AsyncClient:
    """Return a client without a proxy; on loopback a certificate is for another name."""
    parts = urlsplit(url)
    tls = None
    if parts.scheme == "https":
        tls = ssl.create_default_context()
        if parts.hostname in LOOPBACK_HOSTS:
            tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    return httpx.AsyncClient(base_url=url, transport=Transport(tls), timeout=_STREAMED)
