"""Runs `dynamo-vllm console`: a web page that shows, tries and operates a deployment."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dynamo_vllm.cli.process import run_to_exit, silence_runtime
from dynamo_vllm.cli.running import deployment
from dynamo_vllm.config import build, checks, planes, runtime_env
from dynamo_vllm.config.options import ConsoleOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.serving import descriptors
from dynamo_vllm.supervise.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

PROG = "dynamo-vllm console"
DESCRIPTION = """\
Show, try and operate a deployment in a browser. 'dynamo-vllm serve' starts one by itself.

  dynamo-vllm console                                  for the serve on this machine
  dynamo-vllm console --url http://10.0.0.5:8000 --discovery-backend etcd --etcd-endpoints http://10.0.0.5:2379"""
CLOSE_SECONDS = 5.0


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = build.parse(ConsoleOptions, argv, environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of the console; see '{PROG} --help'")
    checks.check_console(options)
    named = None if options.url is None else _base(options.url)
    if options.serve_folder is not None:
        folder: RunFolder | None = RunFolder(Path(options.serve_folder))
    else:
        options, folder = deployment.find(options, environment, None if options.run_dir else named)
    planes.refuse_unreachable(planes.servers(options))
    # Over NATS the runtime makes an endpoint by waiting for another of its threads (serving/plane).
    threads = 4 if options.request_plane == "nats" else 1
    runtime_env.export_caller(options, environment, threads)
    silence_runtime(environment)
    descriptors.raise_limit()
    return run_to_exit(run(options, environment, folder, named))


def _base(url: str) -> str:
    from dynamo_vllm.observe.frontend_client import base

    return base(url)


async def run(
    options: ConsoleOptions, environment: Mapping[str, str], folder: RunFolder | None, named: str | None
) -> int:
    from dynamo_vllm.console import server
    from dynamo_vllm.console.settings import Settings
    from dynamo_vllm.observe.frontend_client import DEFAULT_URL
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.lifecycle.shutdown import end_signals
    from dynamo_vllm.serving.logging import set_up
    from dynamo_vllm.supervise.planning.process import reachable

    set_up(options.log_level)
    progress = Progress(options.status_fd)
    url = named or (folder and folder.url) or DEFAULT_URL
    listening = server.listen(options.console_host, options.console_port, port_after(url))
    port = int(listening.getsockname()[1])
    settings = Settings(
        host=options.console_host,
        port=port,
        url=url,
        frontends=tuple(map(_base, options.frontend)) or (url,),
        namespace=options.namespace,
        names=options.console_hosts,
        read_only=options.console_read_only,
        token=options.admin_token,
        admits_keys=options.gateway_socket is not None,
        folder=folder,
        grafana=options.console_grafana,
    )
    address = f"http://{reachable(options.console_host)}:{port}/"

    def ready() -> None:
        progress.phase("ready", url=address)
        if options.status_fd is None:
            print(f"console: {address}", flush=True)

    return await until_ended(server.run(options, settings, environment, listening, ready), end_signals())


async def until_ended(life: Coroutine[object, object, None], numbers: Sequence[int]) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(life)
    for number in numbers:
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return 0


def port_after(url: str) -> int:
    """Return the port after that of a URL; 0, any, if there is none."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return port + 1 if 1023 < port < 65535 else 0
