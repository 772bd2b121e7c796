"""Runs the control app: opens the database, joins the deployment, listens, ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
import uuid
from typing import TYPE_CHECKING, Any

import httpx
import uvicorn
from starlette.applications import Starlette

from dynamo_vllm.config import private
from dynamo_vllm.errors import StartError
from dynamo_vllm.gateway import ended_requests
from dynamo_vllm.gateway.apis import table as apis
from dynamo_vllm.gateway.apis import tokenize
from dynamo_vllm.gateway.batches.routes import Batches
from dynamo_vllm.gateway.control import capacity, usage_api
from dynamo_vllm.gateway.control.app import ControlApp
from dynamo_vllm.gateway.control.authorization import Authorizer
from dynamo_vllm.gateway.control.deferred_requests import DeferredRequests
from dynamo_vllm.gateway.control.endings import Endings
from dynamo_vllm.gateway.control.metrics import Figures
from dynamo_vllm.gateway.control.web_pages import WebPages
from dynamo_vllm.gateway.envoy.process import open_requests
from dynamo_vllm.gateway.fairness import FairShares
from dynamo_vllm.gateway.heartbeats import Heartbeats
from dynamo_vllm.gateway.responses.routes import Responses
from dynamo_vllm.gateway.store.holders import Holders
from dynamo_vllm.gateway.store.key_ring import KeyRing
from dynamo_vllm.gateway.store.ledger import Ledger
from dynamo_vllm.gateway.store.limits import SEAT_SECONDS, Limiter
from dynamo_vllm.gateway.transport import Transport
from dynamo_vllm.serving.tokens.client import TokenWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from starlette.routing import Route

    from dynamo_vllm.config.options.gateway.serving import GatewayOptions
    from dynamo_vllm.gateway.database import Database, Transaction
    from dynamo_vllm.serving.calls.directory import Directory
    from dynamo_vllm.serving.usage.endpoint import TakeRecords
    from dynamo_vllm.serving.usage.record import UsageRecord

    ServeRecords = Callable[[TakeRecords], Coroutine[Any, Any, None]]

logger = logging.getLogger(__name__)
REFRESH_SECONDS = 0.3
"""How often keys are looked up: a revoked one ends within a second."""
UPKEEP_SECONDS = 10.0
HOLDER_SECONDS = 5.0
"""How often a gateway beats, so that its reservations stay."""
MEASURE_SECONDS = 2.0
KEPT_DAYS = 35.0
"""How long single requests are kept; the sums stay for good."""
LONGEST_SECONDS = 86400.0
"""After so long a reservation is given back whose end was lost, though its gateway lives."""
THREAD_SECONDS = 30.0
"""How long the database's thread may be silent."""
BEAT_SECONDS = 2.5
"""How often a gateway says that it runs a batch or a background response; another may after four times."""
SOCKET, PIPE, ADMIN_SOCKET = "control.sock", "ended.pipe", "envoy-admin.sock"
NAME = "gateway-name"
"""The file with the name that holds reservations: it is as old as the pipe, which tells of their ends."""


class Control:
    """The parts of the control app, while it runs."""

    def __init__(self, options: GatewayOptions, database: Database, folder: Path, data: Path) -> None:
        """`folder` is for sockets, `data` for files of clients."""
        self._options = options
        self._folder = folder
        self._data = data
        self.database = database
        self.shares = FairShares()
        self.ring = KeyRing(database, options.api_key, is_open=options.open)
        self.ledger = Ledger(database)
        self.figures = Figures(database, self.shares)
        self.heartbeats = Heartbeats()
        name, process_name = name_of(folder), new_name()
        self.limits = Limiter(database, name, seat_seconds=SEAT_SECONDS)
        self._deferred_limits = Limiter(database, process_name)
        self._holders = Holders(database, (name, process_name))
        self._endings = Endings(self.limits, name, lambda: self.heartbeats.beat("ends of requests"))
        self._deferred_endings = Endings(
            self._deferred_limits, process_name, lambda: self.heartbeats.beat("ends of deferred requests")
        )
        self._authorizer: Authorizer | None = None
        self._loops: list[asyncio.Task[None]] = []
        """Of what keeps things for clients; one that ends takes the process with it."""
        self._ledger_id = ""

    async def run(
        self,
        serve_records: ServeRecords,
        directory: Directory,
        gateways: Callable[[], int],
        on_ready: Callable[[], None],
    ) -> int:
        """Serve until cancelled, or the deployment cannot be reached any more; return the exit code then."""
        options = self._options
        await self.ring.refresh()
        self._ledger_id = await ledger_id_of(self.database)
        authorizer = self._authorizer = Authorizer(
            self.ring,
            self.limits,
            self.shares,
            self._ledger_id,
            share_cache=options.share_cache or options.open,
            web_pages=WebPages(options.host, options.cors_origin),
            body_bytes=options.max_body_mb << 20,
        )

        async with contextlib.AsyncExitStack() as stack:
            url = options.frontend[0]
            tls = ssl.create_default_context() if url.startswith("https:") else None
            client = httpx.AsyncClient(base_url=url, transport=Transport(tls))
            frontend = await stack.enter_async_context(client)
            await stack.enter_async_context(directory)
            of_workers = apis.routes(frontend, directory, authorizer)
            own = httpx.ASGITransport(Starlette(routes=of_workers))
            lines = await stack.enter_async_context(httpx.AsyncClient(base_url="http://own", transport=own))
            routes = [
                *usage_api.routes(self.database),
                *tokenize.routes(TokenWorkers(directory)),
                *of_workers,
                *self._keeping(frontend, lines, stack),
            ]
            app = ControlApp(authorizer, routes, self.figures.text, self.stopped)
            stack.enter_context(ended_requests.listening(self._folder / PIPE, self._has_ended))
            sockets = stack.enter_context(self._sockets())
            server = Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
            server.on_started = on_ready
            beside = [
                *(self._refresh(), self._keep_up(), self._measure(frontend, gateways)),
                *(self._endings.run(), self._deferred_endings.run(), self._beat()),
                *(server.serve(sockets), serve_records(self._take)),
            ]
            tasks = [*map(asyncio.ensure_future, beside), *self._loops]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
        logger.error("the runtime stopped serving")
        return 1

    def stopped(self) -> list[str]:
        """Name the threads and loops that should run and do not."""
        is_silent = self.database.silent_seconds > THREAD_SECONDS
        return ["the database's thread"] * is_silent + self.heartbeats.stopped()

    def _keeping(
        self, frontend: httpx.AsyncClient, lines: httpx.AsyncClient, stack: contextlib.AsyncExitStack
    ) -> Iterator[Route]:
        """Start what keeps responses, files and batches; it ends with the stack."""
        ended = self._deferred_endings.ended
        share_cache = self._options.share_cache or self._options.open
        gates = (self.ring, self._deferred_limits, self._ledger_id, ended)
        gate = DeferredRequests(*gates, shares=self.shares, share_cache=share_cache)
        batch_gate = DeferredRequests(*gates, share_cache=share_cache)
        responses = Responses(
            self.database, frontend, gate, days=self._options.responses_days, beat_seconds=BEAT_SECONDS
        )
        batches = Batches(
            self.database,
            frontend,
            self._data,
            batch_gate,
            apis=lines,
            concurrency=self._options.batch_concurrency,
            busy=self.shares.busy,
            days=self._options.responses_days,
            beat_seconds=BEAT_SECONDS,
        )
        for part in (responses, batches):
            self._loops += part.start()
            stack.push_async_callback(part.close)
            yield from part.routes()

    @contextlib.contextmanager
    def _sockets(self) -> Any:
        """Listen on a Unix socket for Envoy, and on a port for probes if there is one."""
        path = self._folder / SOCKET
        new = self._folder / f"{SOCKET}.new"
        new.unlink(missing_ok=True)
        ours = socket.socket(socket.AF_UNIX)
        found = [ours]
        try:
            ours.bind(str(new))
            os.chmod(new, 0o600)
            ours.listen(4096)
            os.replace(new, path)  # Envoy never finds one that does not listen
            if self._options.status_port is not None:
                found.append(status_socket(self._options))
            yield found
        except OSError as exc:
            raise StartError(f"the control app cannot listen in {self._folder}: {exc}") from exc
        finally:
            for one in found:
                one.close()

    # --- what goes on beside requests -------------------------------------------------------------------

    async def _refresh(self) -> None:
        while True:
            self.heartbeats.beat("keys")
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.ring.refresh()
            except Exception as exc:  # the keys of the last time stay in force
                logger.warning("keys could not be looked up: %s", exc)

    def _has_ended(self, request_id: str, status: int) -> None:
        if request_id == ended_requests.RESTARTED:
            for lost in self.shares.forget():
                self._has_left(lost)
            self._endings.all_lost()
            return
        self.figures.count(status)
        self._has_left(request_id)
        (self._endings.unused if 400 <= status < 500 else self._endings.ended)(request_id)

    def _has_left(self, request_id: str) -> None:
        self.shares.leave(request_id)
        if self._authorizer is not None:
            self._authorizer.ended(request_id)

    async def _beat(self) -> None:
        """Show other gateways that this one lives, and give back what dead ones had reserved."""
        while True:
            self.heartbeats.beat("beats", HOLDER_SECONDS)
            try:
                for name in await self._holders.beat():
                    logger.warning("gateway %s is gone; its reservations are given back", name)
                    await self._deferred_limits.lose(name)
                    await self._holders.forget(name)
            except Exception as exc:
                logger.warning("beats of gateways could not be written: %s", exc)
            await asyncio.sleep(HOLDER_SECONDS)

    async def _keep_up(self) -> None:
        while True:
            self.heartbeats.beat("upkeep", UPKEEP_SECONDS)
            await asyncio.sleep(UPKEEP_SECONDS)
            try:
                await self.limits.expire(time.time() - LONGEST_SECONDS)
                await self.ledger.prune(time.time() - KEPT_DAYS * 86400)
            except Exception as exc:
                logger.warning("the database could not be tidied: %s", exc)

    async def _measure(self, frontend: httpx.AsyncClient, gateways: Callable[[], int]) -> None:
        """Know how much room the engines have for this gateway, and which requests are gone."""
        transport = httpx.AsyncHTTPTransport(uds=str(self._folder / ADMIN_SOCKET))
        async with httpx.AsyncClient(transport=transport, base_url="http://envoy", timeout=5.0) as envoy:
            while True:
                self.heartbeats.beat("measurements", MEASURE_SECONDS)
                with contextlib.suppress(httpx.HTTPError):
                    if (slots := await capacity.slots(frontend)) is not None:
                        self.shares.slots = slots / max(1, gateways())
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    for request_id in self.shares.forget_lost(await open_requests(envoy)):
                        self._has_left(request_id)
                        self._endings.ended(request_id)
                self.shares.let_in()
                await asyncio.sleep(MEASURE_SECONDS)

    async def _take(self, records: list[UsageRecord]) -> list[int]:
        """Write records into the ledger; those of another ledger are left to their worker."""
        ours = [index for index, record in enumerate(records) if record.ledger_id == self._ledger_id]
        await self.ledger.settle([records[index] for index in ours])
        return ours


def name_of(folder: Path) -> str:
    """Return the name of the gateway with this folder; the first control app there chooses it."""
    path = folder / NAME
    with contextlib.suppress(FileNotFoundError):
        if name := path.read_text():
            return name
    name = new_name()
    private.write(path, name)
    return name


def new_name() -> str:
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:12]}"


async def ledger_id_of(database: Database) -> str:
    """Return the id of the ledger in this database; the first gateway that asks chooses it."""
    new = uuid.uuid4().hex

    def work(t: Transaction) -> str:
        t.execute("INSERT INTO gateway_ledger (id, name) VALUES (1, ?) ON CONFLICT (id) DO NOTHING", new)
        found = t.one("SELECT name FROM gateway_ledger WHERE id = 1")
        return str(found[0]) if found is not None else new

    return await database.run(work)


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which says when it listens."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def status_socket(options: GatewayOptions) -> socket.socket:
    host = options.system_host or "127.0.0.1"
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    assert options.status_port is not None
    made.bind((host, options.status_port + (options.part == "all")))
    made.listen(128)
    return made
