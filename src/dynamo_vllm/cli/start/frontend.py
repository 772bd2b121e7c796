"""Runs `dynamo-vllm frontend`: the runtime's Rust HTTP server and router."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm import ports
from dynamo_vllm.cli.process import run_to_exit
from dynamo_vllm.config import build, checks, folders, planes, runtime_env
from dynamo_vllm.config.options import FrontendOptions
from dynamo_vllm.config.options.frontend import KNOWS_ADAPTERS
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.media.fetch.addresses import Reach
from dynamo_vllm.media.fetch.proxy import Proxy
from dynamo_vllm.serving.watch import request_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo.llm import EntrypointArgs

    from dynamo_vllm.config.planes import EtcdAccess

PROG = "dynamo-vllm frontend"
DESCRIPTION = "Serve the OpenAI API and route requests to the workers of a deployment."
LISTEN_SECONDS = 30.0
CLOSE_SECONDS = 2.0
"""The limit after the drain: the runtime's server (1.6.1) waits forever for clients that do not read."""
LEASE_SECONDS = 120
"""No request is routed to a frontend, so its lease may be long; without etcd it lasts half as long."""


class FrontendState(Protocol):
    """The part of the runtime's extension context that we use."""

    def is_ready(self) -> bool: ...

    def is_cancelled(self) -> bool: ...

    def serving_ready_display_names(self) -> list[str]: ...


def main(argv: Sequence[str]) -> int:
    environment = folders.complete_environment(build.environment(), folders.for_frontend)
    options, rest = build.parse(FrontendOptions, argv, environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of the frontend; see '{PROG} --help'")
    checks.check_frontend(options)
    ports.refuse_taken("--port", options.host, options.port)
    folders.refuse_full_disk(folders.frontend_cache(environment), "set HOME to another folder")
    planes.refuse_unreachable(planes.servers(options, options.event_plane))
    threads = runtime_env.frontend_threads(usable_cores())
    records_url = request_trace.endpoint(options, environment)
    proxy = Proxy(Reach.of(options), [*runtime_env.http_exports(options), *filter(None, [records_url])])
    more = variables(options) | request_trace.variables(records_url) | proxy.variables(environment)
    runtime_env.export(options, environment, threads, "dynamo-vllm-frontend", **more)
    from dynamo_vllm.serving import descriptors

    descriptors.raise_limit()
    return run_to_exit(run(options, planes.etcd_access(options, environment), proxy))


async def run(options: FrontendOptions, etcd: EtcdAccess | None, proxy: Proxy) -> int:
    from dynamo.llm import FrontendRoute, make_engine, run_input

    from dynamo_vllm.serving.admin.endpoint import ENDPOINT
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.lifecycle.shutdown import end_signals, is_repeated_hangup
    from dynamo_vllm.serving.logging import set_up
    from dynamo_vllm.serving.plane import etcd_lease, inotify, runtime, socket_options
    from dynamo_vllm.serving.plane.failures import when_not_busy

    set_up(options.log_level)
    load_nixl()
    progress = Progress(options.status_fd)
    drt = runtime.create(options, inotify.FRONTEND)
    # Workers connect to a socket of ours for their answers; the runtime creates it with the first client.
    await when_not_busy(drt.endpoint(f"{options.namespace}.{ENDPOINT}").client)
    folder = options.discovery_folder
    lease = drt.endpoint(f"{options.namespace}.frontend.lease").connection_id() if etcd or folder else 0
    keeping = asyncio.ensure_future(etcd_lease.keep(etcd, folder, lease))
    engine = await make_engine(drt, entrypoint(options))
    loop = asyncio.get_running_loop()
    asked: list[int] = []
    ended = asyncio.Event()

    def leave(number: int) -> None:
        """Let open requests finish after the first signal; exit at once after the second."""
        if is_repeated_hangup(number, bool(asked)):
            return
        if asked:
            raise SystemExit(128 + number)
        asked.append(number)
        keeping.cancel()  # before the runtime revokes the lease
        drt.shutdown()
        loop.call_later(options.drain_seconds + CLOSE_SECONDS, ended.set)

    for number in end_signals():
        loop.add_signal_handler(number, leave, number)
    routes = [FrontendRoute("GET", "/health", health)]
    with socket_options.restricted_to_loopback(options.bind_host, (options.port, options.system_port)):
        server = asyncio.ensure_future(run_input(drt, "http", engine, routes))
        await listening(options, server)
        scheme = "https" if options.tls_cert_path else "http"
        progress.phase("ready", url=f"{scheme}://{options.host}:{options.port}")
        async with proxy.run():
            await asyncio.wait(
                {server, asyncio.ensure_future(ended.wait())}, return_when=asyncio.FIRST_COMPLETED
            )
        if server.done() and not server.cancelled():
            server.result()
    return 0


def entrypoint(options: FrontendOptions) -> EntrypointArgs:
    """Return the arguments of the runtime's server."""
    from dynamo.llm import EngineType, EntrypointArgs

    from dynamo_vllm.serving.plane.router_config import router_config

    return EntrypointArgs(
        EngineType.Dynamic,
        http_host=options.host,
        http_port=options.port,
        router_config=router_config(options),
        tls_cert_path=options.tls_cert_path,
        tls_key_path=options.tls_key_path,
        namespace=options.namespace if options.namespace_prefix is None else None,
        namespace_prefix=options.namespace_prefix,
        migration_limit=options.migration_limit,
        migration_max_seq_len=options.migration_max_seq_len,
        metrics_prefix=options.metrics_prefix,
        enable_anthropic_api=options.anthropic_api,
    )


def load_nixl() -> None:
    """Load NIXL, if it is installed, for the Rust server, which decodes images for workers that ask for it.

    The server looks for the library by name, but it is not on the loader's path. Without it, a model whose
    card asks for decoding is never served. Loading takes 16 MB and 40 ms.
    """
    for package in ("nixl_cu13", "nixl_cu12"):
        found = importlib.util.find_spec(package)
        for folder in (found.submodule_search_locations or ()) if found else ():
            with contextlib.suppress(OSError):  # made for another CUDA
                ctypes.CDLL(
                    str(Path(folder).with_name(f".{package}.mesonpy.libs") / "libnixl_capi.so"),
                    mode=ctypes.RTLD_GLOBAL,
                )
                return


def variables(options: FrontendOptions) -> dict[str, str]:
    """Return the settings that the Rust server reads only from the environment."""
    found = {"ETCD_LEASE_TTL": str(options.etcd_lease_seconds or LEASE_SECONDS)}
    if options.keep_alive_ms:
        found["DYN_HTTP_SSE_KEEP_ALIVE_INTERVAL_MS"] = str(options.keep_alive_ms)
    return found | {
        "DYN_HTTP_PRE_COMMIT_ERROR_PEEK_MS": str(options.error_wait_ms),
        "DYN_HTTP_BODY_LIMIT_MB": str(options.max_body_mb),
        "DYN_IGNORE_OPENAI_FE_UNSUPPORTED_FIELDS": "1" if options.ignore_unknown_fields else "0",
        "DYN_RUNTIME_INHIBITED_DURATION_SECS": str(options.unreachable_seconds),
        "DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(int(options.drain_seconds)),
        # The server's own /health says "healthy" without a model; ours replaces it and it moves here.
        "DYN_HTTP_SVC_HEALTH_PATH": "/instances",
        # POST /busy_threshold is public and has no token: a client could make it refuse all requests.
        "DYN_DISABLE_FRONTEND_ADMIN_API": "0" if options.frontend_admin_api else "1",
        "DYN_LORA_ENABLED": str(knows_adapters(options)).lower(),
        # It plans which workers get an adapter, and sends all requests to one worker until the plan grows.
        "DYN_LORA_ALLOCATION_ENABLED": "false",
    }


def knows_adapters(options: FrontendOptions) -> bool:
    """Return whether the router knows adapters; with other routers the runtime would serve no model."""
    return options.router in KNOWS_ADAPTERS if options.lora_enabled is None else options.lora_enabled


def health(context: FrontendState) -> object:
    """Answer GET /health: ready means that a model can answer."""
    from dynamo.llm import FrontendResponse

    status = health_status(context)
    models = context.serving_ready_display_names()
    return FrontendResponse(status, {"status": "ready" if status == 200 else "notready", "models": models})


def health_status(context: FrontendState) -> int:
    can_answer = context.is_ready() and not context.is_cancelled() and context.serving_ready_display_names()
    return 200 if can_answer else 503


async def listening(options: FrontendOptions, server: asyncio.Future[None]) -> None:
    """Wait until the server listens, and set the socket options that the Rust server does not set."""
    from dynamo_vllm.serving.plane import socket_options

    deadline = time.monotonic() + LISTEN_SECONDS
    while not socket_options.set_no_delay(options.port):
        if server.done():
            server.result()
        if server.done() or time.monotonic() > deadline:
            raise StartError(f"the HTTP server did not start on {options.host}:{options.port}")
        await asyncio.sleep(0.01)
    socket_options.notice_lost_machines()
