"""Runs `processes`, `restart`, `drain` and `scale`: asks the `serve` of this machine about its processes."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.running import deployment
from dynamo_vllm.cli.tables import table
from dynamo_vllm.config import build
from dynamo_vllm.config.options.control import ChangeOptions, ControlOptions
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise.control import client
from dynamo_vllm.supervise.control.messages import BAD_REQUEST, UNKNOWN, ControlError
from dynamo_vllm.supervise.control.words import Result, drained, restarted, scaled

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PROG = "dynamo-vllm"
LIST_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its arguments, what it asks for, and how the answer is printed."""

    about: str
    text: Callable[[Result], str]
    options: type[ControlOptions] = ControlOptions
    words: tuple[str, ...] = ()
    request: Callable[[Sequence[str]], dict[str, object]] = lambda words: {}


def _named(words: Sequence[str]) -> dict[str, object]:
    return {"name": words[0]}


def _scale(words: Sequence[str]) -> dict[str, object]:
    if not words[1].isdecimal():
        raise ConfigError(f"N {words[1]!r} is not a number of workers: {PROG} scale GROUP N")
    return {"group": words[0], "workers": int(words[1])}


def listed(result: Result) -> str:
    """Return a table of the processes, and a line for each group that has no worker now."""
    rows = [_row(process, result["at"]) for process in result["processes"]]
    head = ("NAME", "STATE", "SINCE", "PID", "GROUP", "ROLE", "RESTARTS", "LAST EXIT", "LOG")
    lines = [table(head, rows)]
    lines += (f"{group['name']}: no workers" for group in result["groups"] if not group["workers"])
    return "\n".join(lines)


def _row(process: Mapping[str, Any], now: float) -> tuple[str, ...]:
    last = process["last_exit"]
    # The phase says more: how far a start is, and that a stop was on purpose.
    state = process["phase"] if process["state"] in ("starting", "stopped") else process["state"]
    return (
        process["name"],
        state,
        _duration(now - process["since"]),
        _or_dash(process["pid"]),
        _or_dash(process["group"]),
        _or_dash(process["role"]),
        str(process["restarts"]),
        "-" if last is None else f"{last['reason']}, {_duration(now - last['at'])} ago",
        process["log"],
    )


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
    )


COMMANDS: dict[str, Command] = {
    "processes": Command("Show the processes of a serve on this machine, and its groups of workers.", listed),
    "restart": Command(
        "Stop a process of a serve on this machine and start it again.\n"
        "It finishes its requests first; what it cannot finish in time moves to another worker.",
        restarted,
        ChangeOptions,
        ("NAME",),
        _named,
    ),
    "drain": Command(
        "Stop a worker of a serve on this machine until 'dynamo-vllm restart NAME'.\n"
        "It finishes its requests first; what it cannot finish in time moves to another worker.",
        drained,
        ChangeOptions,
        ("NAME",),
        _named,
    ),
    "scale": Command(
        "Change the number of workers of a group of a serve on this machine.\n"
        "The newest workers leave first, after their requests. 'dynamo-vllm processes' shows the groups.",
        scaled,
        ChangeOptions,
        ("GROUP", "N"),
        _scale,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run a command; `argv` begins with its name."""
    environment = build.environment()
    name, *rest = argv
    options, request = understand(name, rest, environment)
    folder = deployment.serve_folder(options.run_dir, environment)
    if folder.control is None:
        raise StartError(f"the serve in {folder.path} takes no orders: it is starting, or another version")
    return asyncio.run(run(name, options, folder.control, request))


def understand(
    name: str, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[ControlOptions, dict[str, object]]:
    """Return the options and the request; ConfigError for what is not one."""
    command = COMMANDS[name]
    parser = build.parser(command.options, f"{PROG} {name}", command.about)
    parser.usage = wanted = " ".join((PROG, name, *command.words))
    parser.usage += " [OPTIONS]"
    given, words = parser.parse_known_args(list(argv))
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise ConfigError(f"{unknown} is not an option of {name}; see '{PROG} {name} --help'")
    if len(words) > len(command.words):
        raise ConfigError(f"{words[len(command.words)]!r} is one argument too many: {wanted}")
    if len(words) < len(command.words):
        raise ConfigError(f"{command.words[len(words)]} is missing: {wanted}")
    options = build.from_values(command.options, vars(given), environment)
    request = {"verb": name, **command.request(words)}
    if isinstance(options, ChangeOptions) and options.drain_seconds is not None:
        if not math.isfinite(options.drain_seconds) or options.drain_seconds < 0:
            raise ConfigError(f"--drain-seconds {options.drain_seconds} must be 0 or more, and finite")
        request["drain_seconds"] = options.drain_seconds
    return options, request


async def run(name: str, options: ControlOptions, socket: Path, request: Mapping[str, object]) -> int:
    try:
        result = await client.ask(
            socket,
            request,
            on_progress=lambda progress: print(
                f"{progress['process']}: {progress['phase']}", file=sys.stderr
            ),
            answer_seconds=LIST_SECONDS if name == "processes" else None,
        )
    except ControlError as exc:
        if exc.kind in (BAD_REQUEST, UNKNOWN):
            raise ConfigError(str(exc)) from None
        raise
    print(json.dumps(result, indent=2) if options.json else COMMANDS[name].text(result))
    return 0
