"""Runs the console: joins the deployment as a caller, polls it, listens, ends."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import uvicorn

from dynamo_vllm.console import app
from dynamo_vllm.console.actions import Actions
from dynamo_vllm.console.connections import Connection
from dynamo_vllm.console.data.bench import Bench
from dynamo_vllm.console.data.frontends import Frontends
from dynamo_vllm.console.data.history import History
from dynamo_vllm.console.data.logs import Logs
from dynamo_vllm.console.data.overview import Poller
from dynamo_vllm.console.decisions.service import Decisions
from dynamo_vllm.console.keys import KeyVerbs
from dynamo_vllm.console.live import Collector, Hub
from dynamo_vllm.console.sessions import GatewayKeys, Sessions
from dynamo_vllm.errors import DynamoVllmError, StartError
from dynamo_vllm.gateway.envoy.console import PATH
from dynamo_vllm.serving.admin import client as admin_client
from dynamo_vllm.serving.admin import endpoint as admin_endpoint
from dynamo_vllm.serving.calls.directory import Directory
from dynamo_vllm.serving.tokens import address as tokens_address
from dynamo_vllm.serving.watch.linked_discovery import LinkedDiscovery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp

    from dynamo_vllm.config.options import ConsoleOptions
    from dynamo_vllm.console.settings import Settings
    from dynamo_vllm.gateway.database import Database

logger = logging.getLogger(__name__)
KEEP_ALIVE_SECONDS = 30
MOST_AT_ONCE = 1024
"""Connections and requests of one server; more than `MOST_CONNECTIONS` are there only as they come."""
COLLECT_AFTER = (20_000, 20, 20)
"""New objects until the youngest are looked through, and how often that is until older ones are."""
LOOKS = ("keys_list", "usage")
"""Verbs that change nothing."""
MOST_DONE = 50
"""Actions that pages are told which come later."""
END_SECONDS = 2
"""For answers that are being sent when the console ends."""


async def run(
    options: ConsoleOptions,
    settings: Settings,
    environment: Mapping[str, str],
    listening: socket.socket,
    on_ready: Callable[[], None],
) -> None:
    """Serve until cancelled."""
    from dynamo_vllm.serving.plane import runtime  # imports dynamo

    async with contextlib.AsyncExitStack() as stack:
        linked = None if options.discovery_folder is None else stack.enter_context(links(options))
        drt = runtime.long_caller(options, None if linked is None else linked.folder)
        stack.callback(drt.shutdown)
        workers = await stack.enter_async_context(
            admin_client.Workers(options, may_be_none=True, endpoint=drt.endpoint)
        )
        directory = await stack.enter_async_context(Directory(options.namespace, drt.endpoint))
        frontends = Frontends(settings.frontends, settings.url)
        stack.push_async_callback(frontends.close)
        hub, past = Hub(), History()
        none = admin_client.no_workers_message(options)
        poller = Poller(frontends, workers, directory, past, hub, none, settings.folder)
        bench = Bench(settings.frontends[0], hub.publish, environment)
        stack.push_async_callback(bench.close)

        def done(what: dict[str, Any]) -> None:
            logger.info("%s: %s", what["verb"], what["results"])
            if what["verb"] not in LOOKS:
                hub.publish("action", what, keep=MOST_DONE)
            poller.poll_soon()

        decisions = Decisions(
            options,
            environment,
            options.request_trace_url,
            name=poller.name_of,
            on_rows=Collector(hub, "request").add,
        )
        poller.on_idle, poller.unexplained = decisions.note_idle, decisions.problems
        database = database_of(options, settings, stack)
        keys = GatewayKeys(database) if database is not None and settings.admits_keys else None
        sessions = Sessions(settings.token, keys)
        parts = app.Parts(
            settings=settings,
            hub=hub,
            poller=poller,
            history=past,
            logs=Logs(None if settings.folder is None else settings.folder.logs),
            bench=bench,
            actions=Actions(
                workers,
                settings.folder,
                KeyVerbs(database) if database is not None else None,
                process_of=poller.process_of,
                read_only=settings.read_only,
                on_done=done,
            ),
            deployment=frontends.public,
            decisions=decisions,
        )
        server = Server(config_of(app.make(parts, sessions)))
        server.on_started = on_ready
        rarely_collect()
        stack.callback(hub.close)
        async with asyncio.TaskGroup() as tasks:
            if linked is not None:
                tasks.create_task(linked.run())
            tasks.create_task(poller.run())
            tasks.create_task(decisions.run())
            if keys is not None:
                tasks.create_task(keys.run())
            if options.gateway_socket is not None:
                behind = dataclasses.replace(parts, settings=behind_gateway(options, settings))
                second = Server(config_of(app.make(behind, sessions)))
                tasks.create_task(second.serve([on_socket(Path(options.gateway_socket))]))
            try:
                await server.serve([listening])
            except asyncio.CancelledError:
                hub.close()
                server.should_exit = True
                raise


def behind_gateway(options: ConsoleOptions, settings: Settings) -> Settings:
    """Return how the console is reached through the gateway, whose URL is that of the deployment."""
    url = urlsplit(settings.url)
    port = url.port or (443 if url.scheme == "https" else 80)
    return dataclasses.replace(settings, host=options.gateway_host, port=port, prefix=PATH)


def rarely_collect() -> None:
    """Look for garbage less often: hundreds of thousands of blocks and changes are none, and took a third of
    the console's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


def links(options: ConsoleOptions) -> LinkedDiscovery:
    """Return the part of file discovery that the console calls."""
    assert options.discovery_folder is not None
    names = (admin_endpoint.ENDPOINT, tokens_address.ENDPOINT)
    wanted = {f"{options.namespace}/{name.replace('.', '/')}" for name in names}
    made = LinkedDiscovery(options.discovery_folder, wanted)
    made.follow()
    return made


def database_of(
    options: ConsoleOptions, settings: Settings, stack: contextlib.AsyncExitStack
) -> Database | None:
    """Return the gateway's database; without a login every user of the machine could change its keys."""
    if options.database is None or not settings.needs_login:
        return None
    from dynamo_vllm.gateway import schema
    from dynamo_vllm.gateway.database import Database

    try:
        database = Database(options.database, schema.ALL)
    except DynamoVllmError as exc:
        logger.warning("keys and usage are not shown: %s", exc)
        return None
    stack.callback(database.close)
    return database


class Server(uvicorn.Server):
    """uvicorn without its signal handlers, which says when it listens."""

    on_started: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def config_of(made: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        made,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=END_SECONDS,
        limit_concurrency=MOST_AT_ONCE,
        h11_max_incomplete_event_size=64 << 10,
        http=Connection,
        ws="none",
    )


def listen(host: str, port: int | None, first: int) -> socket.socket:
    """Return a listening socket: on `port`, or else on `first`, or a free one if that is taken."""
    try:
        return _listening(host, first if port is None else port)
    except OSError as exc:
        if port is not None:
            raise StartError(
                f"--console-port {port} on {host} cannot be used: {exc.strerror}; choose another"
            ) from None
    try:
        return _listening(host, 0)
    except OSError as exc:
        raise StartError(f"--console-host {host} cannot be used: {exc.strerror}; choose another") from None


def on_socket(path: Path) -> socket.socket:
    """Return a listening Unix socket that is only this user's."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    except OSError as exc:
        made.close()
        raise StartError(f"the gateway's socket {path} cannot be opened: {exc.strerror}") from None
    finally:
        os.umask(before)
    made.listen(128)
    made.setblocking(False)
    return made


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(128)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
