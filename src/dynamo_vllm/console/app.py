"""The routes of the console."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from dynamo_vllm import __version__
from dynamo_vllm.console.actions import Asked
from dynamo_vllm.console.data.bench import BenchRequest
from dynamo_vllm.console.data.history import ITL_SECONDS, KEPT_SECONDS, TTFT_SECONDS
from dynamo_vllm.console.data.logs import LogQuery
from dynamo_vllm.console.logins import LOGIN_BYTES, Logins
from dynamo_vllm.console.passing import MOST_UPLOADS, passed_on
from dynamo_vllm.console.replies import (
    JSON,
    ConsoleError,
    decoded,
    number,
    refused,
    reply,
    whole_number,
)
from dynamo_vllm.console.security import Guard, headers_of, session_of
from dynamo_vllm.console.sessions import SESSION_SECONDS, Sessions, is_this_machine
from dynamo_vllm.gateway.identity import CLIENT

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from dynamo_vllm.console.actions import Actions
    from dynamo_vllm.console.data.bench import Bench
    from dynamo_vllm.console.data.history import History
    from dynamo_vllm.console.data.logs import Logs
    from dynamo_vllm.console.data.overview import Poller
    from dynamo_vllm.console.live import Hub
    from dynamo_vllm.console.settings import Settings

logger = logging.getLogger(__name__)
FIRST_SECONDS = 10.0
"""How long the first request waits for the first poll."""
MOST_REQUESTS = 1000
MOST_BYTE = 1 << 50
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".json": JSON,
}
NO_PAGE = (
    b"<!doctype html><title>Console</title><p>This installation has no page; the API is below /api.</p>\n"
)


class DecisionSource(Protocol):
    """Knows the requests of the deployment, and why each went where it did."""

    def requests(
        self, limit: int, before: str | None, worker: str | None, model: str | None
    ) -> dict[str, Any]: ...

    def request(self, id: str) -> dict[str, Any] | None: ...

    async def caches(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the routes answer from."""

    settings: Settings
    hub: Hub
    poller: Poller
    history: History
    logs: Logs
    bench: Bench
    actions: Actions
    deployment: httpx.AsyncClient
    """A client of the deployment's public URL."""
    decisions: DecisionSource | None = None


def make(parts: Parts, sessions: Sessions | None = None) -> ASGIApp:
    """Return the application; one that browsers reach in two ways has the same sessions in both."""
    sessions = sessions or Sessions(parts.settings.token)
    routes = Routes(parts, sessions)
    app = Starlette(
        routes=routes.all(),
        exception_handlers={ConsoleError: refused, 404: _unknown, 405: _unknown, Exception: _failed},
    )
    return Guard(app, parts.settings, sessions)


class Routes:
    """One method per route."""

    def __init__(self, parts: Parts, sessions: Sessions) -> None:
        self._parts = parts
        self._sessions = sessions
        self._assets = read_assets()
        self._logins = Logins()
        self._reading_logs = asyncio.Lock()
        """One page at a time: a filter that finds little reads megabytes."""
        self._uploads = asyncio.Semaphore(MOST_UPLOADS)

    def all(self) -> list[Route]:
        get, post = ["GET"], ["POST"]
        return [
            Route("/", self.page, methods=get),
            Route("/live", self.live_check, methods=get),
            Route("/assets/{name}", self.asset, methods=get),
            Route("/api/settings", self.settings, methods=get),
            Route("/api/login", self.login, methods=post),
            Route("/api/logout", self.logout, methods=post),
            Route("/api/overview", self.overview, methods=get),
            Route("/api/live", self.live, methods=get),
            Route("/api/history", self.history, methods=get),
            Route("/api/requests", self.requests, methods=get),
            Route("/api/requests/{id}", self.request, methods=get),
            Route("/api/caches", self.caches, methods=get),
            Route("/api/logs", self.logs, methods=get),
            Route("/api/logs/{name}", self.log, methods=get),
            Route("/api/actions/{verb}", self.act, methods=post),
            Route("/api/bench", self.bench, methods=get),
            Route("/api/bench", self.start_bench, methods=post),
            Route("/api/bench/stop", self.stop_bench, methods=post),
            Route("/v1/{path:path}", self.pass_on, methods=["GET", "POST"]),
        ]

    # --- the page -----------------------------------------------------------------------------------------

    async def page(self, _: Request) -> Response:
        body = self._assets.get("index.html", NO_PAGE)
        return Response(body, media_type="text/html", headers={"cache-control": "no-cache"})

    async def asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        kind = TYPES.get(name[name.rfind(".") :])
        if name not in self._assets or kind is None:
            raise ConsoleError(404, f"there is no asset {name!r}")
        headers = {"content-type": kind, "cache-control": "no-cache"}
        return Response(self._assets[name], headers=headers)

    async def live_check(self, _: Request) -> Response:
        return Response(b"")

    # --- who and what -------------------------------------------------------------------------------------

    async def settings(self, request: Request) -> Response:
        known, settings = self._is_known(request), self._parts.settings
        return reply(
            {
                "version": __version__ if known else None,
                "read_only": settings.read_only,
                "needs_login": settings.needs_login,
                "login_with": self._sessions.words if settings.needs_login else None,
                "logged_in": known,
                "url": settings.url if known else None,
                "namespace": settings.namespace if known else None,
                "run_folder": settings.folder is not None,
                "models": self._parts.poller.models if known else [],
                "grafana": settings.grafana if known else None,
                "actions": self._parts.actions.names if known else [],
                "prompt_text": False,
            }
        )

    def _is_known(self, request: Request) -> bool:
        settings = self._parts.settings
        return not settings.needs_login or self._sessions.is_open(self._session(request))

    def _session(self, request: Request) -> str | None:
        return session_of(headers_of(request.scope), self._parts.settings)

    async def login(self, request: Request) -> Response:
        client = self._client(request)
        secret = await self._logins.run(client, lambda: self._opened(request, client))
        answer = reply({"logged_in": True})
        if secret is not None:
            answer.set_cookie(
                self._parts.settings.cookie,
                secret,
                max_age=int(SESSION_SECONDS),
                httponly=True,
                samesite="strict",
                path=self._parts.settings.prefix,
                secure=request.headers.get("origin", "").startswith("https://"),
            )
        return answer

    async def _opened(self, request: Request, client: str) -> str | None:
        """Return the secret of a new session; None where nobody needs one."""
        login = await decoded(request, dict[str, str], LOGIN_BYTES)
        if not self._parts.settings.needs_login:
            return None
        return await self._sessions.open(login.get("token", ""), client)

    def _client(self, request: Request) -> str:
        """Return the address of the client, which the gateway tells of its own; nothing for this machine.

        So users of this machine who come through the gateway are counted apart from those who do not.
        """
        if self._parts.settings.is_behind_gateway:
            return request.headers.get(CLIENT, "")
        address = "" if request.client is None else request.client.host
        return "" if is_this_machine(address) else address

    async def logout(self, request: Request) -> Response:
        self._sessions.close(self._session(request))
        answer = reply({"logged_in": not self._parts.settings.needs_login})
        settings = self._parts.settings
        answer.delete_cookie(settings.cookie, settings.prefix, httponly=True, samesite="strict")
        return answer

    # --- what is there ------------------------------------------------------------------------------------

    async def overview(self, _: Request) -> Response:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._parts.poller.first.wait()
        if not self._parts.poller.overview:
            raise ConsoleError(503, "the deployment was not asked yet", "try again in a moment")
        if self._parts.poller.is_old:
            self._parts.poller.poll_soon()  # for the next time
        return reply(self._parts.poller.overview)

    async def live(self, request: Request) -> Response:
        return self._parts.hub.response(functools.partial(self._is_known, request))

    async def history(self, request: Request) -> Response:
        seconds = number(request, "seconds", KEPT_SECONDS, 10, KEPT_SECONDS)
        ttft_ms = number(request, "ttft_ms", 1000 * TTFT_SECONDS, 1, 1e6)
        itl_ms = number(request, "itl_ms", 1000 * ITL_SECONDS, 1, 1e6)
        found = self._parts.history.series(seconds, time.time(), ttft_ms / 1000, itl_ms / 1000)
        return reply(found)

    async def requests(self, request: Request) -> Response:
        limit = whole_number(request, "limit", 100, 1, MOST_REQUESTS)
        asked = request.query_params
        if self._parts.decisions is None:
            return reply({"requests": [], "dropped": 0})
        words = (asked.get(name) or None for name in ("before", "worker", "model"))
        return reply(self._parts.decisions.requests(limit, *words))

    async def request(self, request: Request) -> Response:
        wanted = request.path_params["id"]
        found = None if self._parts.decisions is None else self._parts.decisions.request(wanted)
        if found is None:
            raise ConsoleError(404, f"request {wanted!r} is not known", "only the last requests are kept")
        return reply(found)

    async def caches(self, _: Request) -> Response:
        if self._parts.decisions is None:
            empty = {"nodes": [], "left_out": 0}
            return reply(
                {"at": round(time.time(), 3), "block_size": None, "blocks": 0, "workers": [], "tree": empty}
            )
        return reply(await self._parts.decisions.caches())

    async def logs(self, _: Request) -> Response:
        return reply({"logs": await asyncio.to_thread(self._parts.logs.listed)})

    async def log(self, request: Request) -> Response:
        asked = request.query_params
        query = LogQuery(
            before=whole_number(request, "before", 0, 0, MOST_BYTE) if asked.get("before") else None,
            after=whole_number(request, "after", 0, 0, MOST_BYTE) if asked.get("after") else None,
            limit=whole_number(request, "limit", 500, 1, 10000),
            level=asked.get("level") or None,
            text=asked.get("text") or None,
        )
        name = request.path_params["name"]
        async with self._reading_logs:
            found = await asyncio.to_thread(self._parts.logs.lines, name, query)
        return reply(found)

    # --- what can be done ---------------------------------------------------------------------------------

    async def act(self, request: Request) -> Response:
        asked = await decoded(request, Asked)
        return reply(await self._parts.actions.perform(request.path_params["verb"], asked))

    async def bench(self, _: Request) -> Response:
        return reply(self._parts.bench.state())

    async def start_bench(self, request: Request) -> Response:
        self._parts.actions.refuse_if_read_only()
        return reply(await self._parts.bench.start(await decoded(request, BenchRequest)))

    async def stop_bench(self, _: Request) -> Response:
        self._parts.actions.refuse_if_read_only()
        return reply(await self._parts.bench.stop())

    async def pass_on(self, request: Request) -> Response:
        return await passed_on(request, self._parts.deployment, self._uploads)


def read_assets() -> dict[str, bytes]:
    """Return the files of the page by name; there are few and small ones."""
    folder = resources.files("dynamo_vllm.console") / "assets"
    if not folder.is_dir():
        return {}
    return {one.name: one.read_bytes() for one in folder.iterdir() if one.is_file()}


def _unknown(request: Request, exc: Exception) -> Response:
    status: int = getattr(exc, "status_code", 404)
    message = f"there is no {request.method} {request.url.path}"
    return Response(ConsoleError(status, message).body(), status, media_type=JSON)


def _failed(request: Request, exc: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=exc)
    body = msgspec.json.encode({"error": {"message": "the console failed", "fix": "see its log"}})
    return Response(body, 500, media_type=JSON)
