"""Runs `dynamo-vllm gateway`: Envoy and the control app in front of the frontends of a deployment."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm import ports
from dynamo_vllm.cli.process import run_to_exit
from dynamo_vllm.config import build, checks, folders, planes, private, runtime_env
from dynamo_vllm.config.options import GatewayOptions
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from dynamo_vllm.config.options import GatewaySettings
    from dynamo_vllm.gateway.envoy.settings import EnvoySettings

PROG = "dynamo-vllm gateway"
DESCRIPTION = """\
Stand in front of a deployment: API keys, limits, usage, TLS, and the APIs that keep something.

  dynamo-vllm keys create alice                         a key; it is shown once
  dynamo-vllm gateway --frontend http://127.0.0.1:8000  beside a 'dynamo-vllm frontend'
  dynamo-vllm serve --gateway                           the same, with a frontend and workers"""
CLOSE_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    environment = folders.complete_environment(build.environment(), folders.for_frontend)
    options, rest = build.parse(GatewayOptions, argv, environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of the gateway; see '{PROG} --help'")
    checks.check_gateway(options)
    if options.part != "control":
        ports.refuse_taken("--port", options.host, options.port)
    if options.part != "envoy":
        planes.refuse_unreachable(planes.servers(options, options.event_plane))
        # Over NATS the runtime makes an endpoint by waiting for another of its threads (serving/plane).
        threads = 4 if options.request_plane == "nats" else 1
        runtime_env.export(options, environment, threads, "dynamo-vllm-gateway")
    from dynamo_vllm.serving import descriptors

    descriptors.raise_limit()
    with gateway_folder(options) as folder:
        return run_to_exit(run(options, environment, folder))


@contextlib.contextmanager
def gateway_folder(options: GatewayOptions) -> Iterator[Path]:
    """Yield the folder for sockets, whose names must be short."""
    from dynamo_vllm.serving import scratch

    if options.gateway_dir is not None:
        folder = Path(options.gateway_dir)
        private.make(folder)
        yield folder
        return
    with scratch.folder() as made:
        yield Path(made)


async def run(options: GatewayOptions, environment: Mapping[str, str], folder: Path) -> int:
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.lifecycle.shutdown import end_signals
    from dynamo_vllm.serving.logging import set_up

    set_up(options.log_level)
    progress = Progress(options.status_fd)
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[int] = loop.create_future()

    def end() -> None:
        if not ending.done():
            ending.set_result(0)

    for number in end_signals():
        loop.add_signal_handler(number, end)
    waiting = {"all": 2}.get(options.part, 1)

    def ready() -> None:
        nonlocal waiting
        waiting -= 1
        if waiting == 0:
            scheme = "https" if options.tls_cert_path else "http"
            progress.phase("ready", url=f"{scheme}://{options.host}:{options.port}")

    async with contextlib.AsyncExitStack() as stack:
        parts: list[asyncio.Task[int]] = []
        if options.part != "envoy":
            parts.append(await stack.enter_async_context(control(options, environment, folder, ready)))
        if options.part != "control":
            parts.append(await stack.enter_async_context(envoy(options, folder, ready)))
        await asyncio.wait([ending, *parts], return_when=asyncio.FIRST_COMPLETED)
        return next((part.result() for part in parts if part.done()), 0)


@contextlib.asynccontextmanager
async def control(
    options: GatewayOptions, environment: Mapping[str, str], folder: Path, ready: Callable[[], None]
) -> AsyncIterator[asyncio.Task[int]]:
    """Run the control app while the context is open."""
    from dynamo_vllm.gateway import schema
    from dynamo_vllm.gateway.control.server import Control
    from dynamo_vllm.gateway.database import Database
    from dynamo_vllm.serving.calls.directory import Directory
    from dynamo_vllm.serving.plane import etcd_lease, inotify, runtime
    from dynamo_vllm.serving.plane.failures import when_not_busy
    from dynamo_vllm.serving.usage import endpoint
    from dynamo_vllm.serving.usage.record import ENDPOINT

    database = Database(database_url(options, environment), schema.ALL)
    drt = runtime.create(options, inotify.WORKER)
    etcd, discovery = planes.etcd_access(options, environment), options.discovery_folder
    lease = drt.endpoint(f"{options.namespace}.gateway.lease").connection_id() if etcd or discovery else 0
    keeping = asyncio.ensure_future(etcd_lease.keep(etcd, discovery, lease))
    serve_records = functools.partial(endpoint.serve, drt, options.namespace)
    data = Path(options.data_dir or folders.data(environment) / "files")
    private.make(data)
    made = Control(options, database, folder, data)
    others = await when_not_busy(drt.endpoint(f"{options.namespace}.{ENDPOINT}").client)
    task = asyncio.create_task(
        made.run(
            serve_records, Directory(options.namespace, drt.endpoint), lambda: len(others.instances()), ready
        )
    )
    try:
        yield task
    finally:
        keeping.cancel()
        task.cancel()
        await asyncio.wait([task], timeout=CLOSE_SECONDS)
        drt.shutdown()
        database.close()


@contextlib.asynccontextmanager
async def envoy(
    options: GatewayOptions, folder: Path, ready: Callable[[], None]
) -> AsyncIterator[asyncio.Task[int]]:
    """Run Envoy while the context is open."""
    from dynamo_vllm.gateway.envoy import process

    running = process.Envoy(process.find(options.envoy_path), envoy_settings(options, folder), folder)
    task = asyncio.create_task(running.run(ready))
    try:
        yield task
    finally:
        await running.end(options.drain_seconds)
        await asyncio.wait([task], timeout=CLOSE_SECONDS)


def envoy_settings(options: GatewayOptions, folder: Path) -> EnvoySettings:
    from dynamo_vllm.config.rules.kv_tiers import memory_bytes
    from dynamo_vllm.gateway.control.server import ADMIN_SOCKET, PIPE, SOCKET
    from dynamo_vllm.gateway.envoy.settings import EnvoySettings, heap_for

    return EnvoySettings(
        host=options.host,
        port=options.port,
        frontends=options.frontend,
        control_socket=str(folder / SOCKET),
        admin_socket=str(folder / ADMIN_SOCKET),
        console_socket=options.console_socket,
        ended_pipe=str(folder / PIPE),
        status_host=options.system_host,
        status_port=options.status_port,
        tls_cert_path=options.tls_cert_path,
        tls_key_path=options.tls_key_path,
        access_log=access_log(options),
        max_body_bytes=options.max_body_mb << 20,
        header_kb=options.header_kb,
        max_connections=options.max_connections,
        idle_seconds=options.idle_seconds,
        stream_idle_seconds=options.stream_idle_seconds,
        heap_bytes=heap_for(memory_bytes()),
        trusted_proxies=options.trusted_proxies,
        cors_origins=options.cors_origin,
    )


def access_log(options: GatewayOptions) -> str | None:
    """Return where the access log goes: the standard output, which `serve` keeps as a log and rotates."""
    return "/dev/stdout" if options.access_log else None


def database_url(settings: GatewaySettings, environment: Mapping[str, str]) -> str:
    from dynamo_vllm.gateway.database import default_url

    return settings.database or default_url(environment)


def refuse_without_keys(
    settings: GatewaySettings, environment: Mapping[str, str], public_host: str | None
) -> None:
    """Refuse a gateway that could let nobody in, before anything starts."""
    from dynamo_vllm.gateway import schema
    from dynamo_vllm.gateway.database import Database
    from dynamo_vllm.gateway.store import keys

    if settings.api_key:
        return
    database = Database(database_url(settings, environment), schema.ALL)
    try:
        has_keys = bool(database.run_now(keys.find_all()))
    finally:
        database.close()
    if has_keys:
        return
    why = (
        "the gateway"
        if public_host is None
        else f"--host {public_host} is for other machines, so the gateway"
    )
    more = "" if public_host is None else ", or say --open to let everybody in"
    raise ConfigError(
        f"{why} needs an API key, and there is none; create one with 'dynamo-vllm keys create NAME', "
        f"or give one with VLLM_API_KEY{more}"
    )
