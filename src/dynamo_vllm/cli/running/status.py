"""Runs `dynamo-vllm status`: shows the models and workers of a running system."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.cli.process import ask_quietly
from dynamo_vllm.cli.running import deployment, status_text
from dynamo_vllm.cli.running.watch import WatchScreen, watch
from dynamo_vllm.config import build, checks, runtime_env
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.observe.ask import ask_all
from dynamo_vllm.observe.frontend_client import DEFAULT_URL, FrontendClient, Unanswered, base
from dynamo_vllm.serving.admin import client as admin_client

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.observe.status_data import SystemStatus

PROG = "dynamo-vllm status"
DESCRIPTION = (
    "Show models, workers and figures of a running system. The URL may also be the first argument.\n"
    "Models and requests are the frontend's; workers are found in discovery and report their own state."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions(FindOptions):
    """The options of `status`."""

    url: str | None = opt(
        None,
        "status",
        f"URL of the frontend (default: that of the serve on this machine, else {DEFAULT_URL}).",
        env="DYN_VLLM_URL",
        metavar="URL",
    )
    timeout: float = opt(
        10.0, "status", "Seconds to wait for an answer.", env="DYN_VLLM_STATUS_TIMEOUT", metavar="SECONDS"
    )
    watch: float | None = opt(
        None,
        "status",
        "Repeat at this interval, 2 by default, until Ctrl-C; with --json, print one line each time.",
        env="DYN_VLLM_STATUS_WATCH",
        metavar="SECONDS",
        bare_value="2",
    )
    json: bool = opt(False, "status", "Print JSON for other programs.", env="DYN_VLLM_STATUS_JSON")


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    options, rest = understand(argv, environment)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of status; see '{PROG} --help'")
    checks.check_find(options)
    refuse_bad_times(options)
    named = None if options.url is None else base(options.url)
    options, folder = deployment.find(options, environment, named)
    url = named or (folder and folder.url) or DEFAULT_URL
    with closing(FrontendClient(url, options.timeout)) as client:
        if has_discovery(options):
            runtime_env.export_caller(options, environment)
            return ask_quietly(run(options, client), environment)
        return asyncio.run(run(options, client))


def understand(argv: Sequence[str], environment: Mapping[str, str]) -> tuple[StatusOptions, list[str]]:
    parser = build.parser(StatusOptions, PROG, DESCRIPTION, own_first=True)
    given, rest = parser.parse_known_args(deployment.with_url_flag(argv))
    return build.from_values(StatusOptions, vars(given), environment), rest


def refuse_bad_times(options: StatusOptions) -> None:
    for flag, seconds in (("--timeout", options.timeout), ("--watch", options.watch)):
        if seconds is not None and seconds <= 0:
            raise ConfigError(f"{flag} {seconds:g} must be above 0")


def has_discovery(options: StatusOptions) -> bool:
    """Return whether workers can be found: without the folder there are none, and no runtime is needed."""
    folder = options.discovery_folder
    return folder is None or folder.is_dir() or options.watch is not None


async def run(options: StatusOptions, client: FrontendClient) -> int:
    async with AsyncExitStack() as stack:
        workers, problem = None, admin_client.no_workers_message(options)
        if has_discovery(options):
            try:
                workers = await stack.enter_async_context(admin_client.Workers(options, may_be_none=True))
                await workers.seen()
            except admin_client.NoWorkers as exc:
                problem = str(exc)
        if options.watch is not None:
            return await keep_showing(options, client, workers, problem)
        found = await ask(options, client, workers, problem)
    if found.frontend is None and not found.workers:
        raise Unanswered(f"{found.frontend_problem}\n{found.workers_problem}")
    print(json.dumps(found.builtins(), indent=2) if options.json else status_text.text(found))
    return 0


async def keep_showing(
    options: StatusOptions, client: FrontendClient, workers: admin_client.Workers | None, problem: str
) -> int:
    async def look() -> str:
        found = await ask(options, client, workers, problem)
        return json.dumps(found.builtins()) if options.json else status_text.text(found)

    with WatchScreen(sys.stdout, is_live=sys.stdout.isatty() and not options.json) as screen:
        try:
            await watch(look, screen.show, options.watch or 0)
        except (asyncio.CancelledError, BrokenPipeError):  # Ctrl-C, or the reader has gone
            return 0
    return 0


async def ask(
    options: StatusOptions, client: FrontendClient, workers: admin_client.Workers | None, problem: str
) -> SystemStatus:
    place = f"namespace {options.namespace} in {admin_client.place(options)}"
    return await ask_all(client, workers, place, problem, options.timeout)
