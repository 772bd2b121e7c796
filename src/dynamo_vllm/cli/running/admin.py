"""Runs the commands that control running workers, such as `lora load` and `sleep`, from one table."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.process import ask_quietly
from dynamo_vllm.cli.running import deployment, worker_names
from dynamo_vllm.cli.units import size
from dynamo_vllm.config import build, checks, runtime_env
from dynamo_vllm.config.options import (
    AdminOptions,
    DrainOptions,
    PauseOptions,
    ProfileOptions,
    ResetOptions,
    SleepOptions,
)
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.serving.admin.client import Workers

    Reply = dict[str, Any]

PROG = "dynamo-vllm"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the admin verb that it calls, its arguments, and how its replies are printed."""

    verb: str
    about: str
    describe: Callable[[Reply], str]
    """Describes what a worker did, from its reply."""
    options: type[AdminOptions] = AdminOptions
    words: tuple[str, ...] = ()
    """Names of the command's positional arguments."""
    body: Callable[[Any, Sequence[str]], dict[str, Any]] = lambda options, words: {}
    everywhere: bool = False
    """Whether it calls every worker unless one is named."""

    @property
    def target(self) -> str:
        if self.everywhere:
            return "It applies to every worker, unless --worker names one."
        return "With several workers, give --all or --worker ID."


def _loaded(reply: Reply) -> str:
    if reply.get("already_loaded"):
        return "already loaded"
    rank, count = reply.get("rank"), reply.get("bytes")
    facts = [f"rank {rank}"] * bool(rank) + [size(count)] * bool(count)
    return ", ".join([f"loaded in {_seconds(reply)}", *facts])


def _asleep(reply: Reply) -> str:
    if reply.get("already"):
        return "already asleep"
    freed = f", {size(reply['freed_bytes'])} freed" if reply.get("freed_bytes") else ""
    return f"asleep after {_seconds(reply)}{freed}"


def _awake(reply: Reply) -> str:
    return "already awake" if reply.get("already") else f"awake after {_seconds(reply)}"


def _seconds(reply: Reply) -> str:
    return f"{float(reply.get('seconds') or 0):.1f} s"


def _or_already(done: str, already: str) -> Callable[[Reply], str]:
    return lambda reply: already if reply.get("already") else done


def source(uri: str) -> str:
    """Make a folder's path absolute, because the worker may run in another folder."""
    return uri if "://" in uri else os.path.abspath(uri)


def _drain(options: DrainOptions, body: dict[str, object]) -> dict[str, object]:
    return body if options.drain_seconds is None else {**body, "drain_seconds": options.drain_seconds}


COMMANDS: dict[str, Command] = {
    "lora load": Command(
        "load_lora",
        "Load a LoRA adapter. URI is a folder that the workers see too, file://…, hf://owner/name or "
        "s3://bucket/prefix.",
        _loaded,
        words=("NAME", "URI"),
        body=lambda options, words: {"lora_name": words[0], "source": {"uri": source(words[1])}},
        everywhere=True,
    ),
    "lora unload": Command(
        "unload_lora",
        "Unload an adapter once no request uses it any more.",
        lambda reply: "unloaded",
        words=("NAME",),
        body=lambda options, words: {"lora_name": words[0]},
        everywhere=True,
    ),
    "lora list": Command(
        "list_loras",
        "Show the adapters of the workers.",
        lambda reply: f"{reply.get('count', 0)} of {reply.get('capacity', '?')} adapters",
        everywhere=True,
    ),
    "sleep": Command(
        "sleep",
        "Take workers out of service and free the memory of their engines.",
        _asleep,
        options=SleepOptions,
        body=lambda options, words: _drain(options, {"level": options.level}),
    ),
    "wake": Command("wake_up", "Wake sleeping workers and put them back into service.", _awake),
    "pause": Command(
        "pause",
        "Pause workers; everything stays in memory.",
        _or_already("paused", "already paused"),
        options=PauseOptions,
        body=lambda options, words: _drain(options, {"mode": "keep" if options.keep else "wait"}),
    ),
    "resume": Command("resume", "Resume paused workers.", _or_already("resumed", "was not paused")),
    "clear-kv": Command("clear_kv_blocks", "Clear every cached KV block.", lambda reply: "KV blocks cleared"),
    "reset-caches": Command(
        "reset_caches",
        "Clear caches: KV blocks, processed media, encoder outputs.",
        lambda reply: "caches cleared",
        options=ResetOptions,
        body=lambda options, words: {"kinds": list(dict.fromkeys(options.kind))},
    ),
    "profile start": Command(
        "start_profile",
        "Start a profile of the engine; the worker must have been started with vLLM's --profiler-config.",
        lambda reply: "profiling",
        options=ProfileOptions,
        body=lambda options, words: {} if options.prefix is None else {"prefix": options.prefix},
    ),
    "profile stop": Command(
        "stop_profile",
        "Stop the profile and write it.",
        lambda reply: f"profile in {reply['folder']}" if reply.get("folder") else "profile written",
        options=ProfileOptions,
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run a command; `argv` begins with its name."""
    environment = build.environment()
    name, rest = named(argv)
    if name is None:
        print(usage(argv[0]))
        return 0 if len(argv) > 1 else 2
    command = COMMANDS[name]
    options, words = understand(name, command, rest, environment)
    options, _ = deployment.find(options, environment)
    refuse_missing_folder(options)
    runtime_env.export_caller(options, environment)
    return ask_quietly(run(name, command, options, words), environment)


# --- what was asked for -----------------------------------------------------------------------------------


def named(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the name of the command and the other arguments; None if the name's second word is missing."""
    first, *rest = argv
    if first in COMMANDS:
        return first, rest
    if not rest or rest[0] in ("-h", "--help"):
        return None, []
    name = f"{first} {rest[0]}"
    if name not in COMMANDS:
        raise ConfigError(f"{first}: {rest[0]!r} is unknown; choose one of {', '.join(_parts(first))}")
    return name, rest[1:]


def _parts(first: str) -> list[str]:
    return [name.split()[1] for name in COMMANDS if name.startswith(f"{first} ")]


def usage(first: str) -> str:
    lines = [f"usage: {PROG} {first} {'|'.join(_parts(first))} [OPTIONS]", ""]
    for part in _parts(first):
        command = COMMANDS[f"{first} {part}"]
        lines.append(f"  {' '.join((part, *command.words)):<16} {command.about.split('. ')[0].rstrip('.')}")
    return "\n".join([*lines, "", f"  {PROG} {first} {_parts(first)[0]} --help  its options"])


def understand(
    name: str, command: Command, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[AdminOptions, list[str]]:
    parser = build.parser(
        command.options, f"{PROG} {name}", f"{command.about}\n{command.target}", own_first=True
    )
    parser.usage = " ".join((PROG, name, *command.words, "[OPTIONS]"))
    given, words = parser.parse_known_args(list(argv))
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise ConfigError(f"{unknown} is not an option of {name}; see '{PROG} {name} --help'")
    wanted = " ".join((PROG, name, *command.words))
    if len(words) > len(command.words):
        raise ConfigError(f"{words[len(command.words)]!r} is one argument too many: {wanted}")
    if len(words) < len(command.words) or not all(words):
        missing = command.words[words.index("") if "" in words else len(words)]
        raise ConfigError(f"{missing} is missing: {wanted}")
    options = build.from_values(command.options, vars(given), environment)
    checks.check_admin(options)
    return options, words


def refuse_missing_folder(options: AdminOptions) -> None:
    """Raise before the runtime is loaded, because it would create the folder."""
    from dynamo_vllm.serving.admin.client import NoWorkers, no_workers_message

    folder = options.discovery_folder
    if folder is not None and not folder.is_dir():
        raise NoWorkers(no_workers_message(options))


# --- the calls --------------------------------------------------------------------------------------------


async def run(name: str, command: Command, options: AdminOptions, words: Sequence[str]) -> int:
    from dynamo_vllm.serving.admin.client import Workers

    async with Workers(options) as workers:
        found = workers.found
        if not (command.everywhere or options.all or options.worker) and len(found) > 1:
            found = await reachable(workers)
        chosen = worker_names.choose(found, options.worker, options.all or command.everywhere)
        names = worker_names.short(workers.found)
        replies = await ask(workers, command, options, words, {i: names.get(i, f"{i:x}") for i in chosen})
    report(name, command, options, replies, {i: names.get(i, f"{i:x}") for i in chosen})
    return 0 if all(reply.get("status") == "success" for reply in replies.values()) else 1


async def reachable(workers: Workers) -> list[int]:
    """Return the workers that can be reached: discovery still lists a killed worker for some seconds."""
    replies = await workers.ask_all("status", 2.0)
    found = [instance for instance, reply in replies.items() if reply.get("error") != "unreachable"]
    return found or list(replies)


async def ask(
    workers: Workers,
    command: Command,
    options: AdminOptions,
    words: Sequence[str],
    names: Mapping[int, str],
) -> dict[int, Reply]:
    body, seconds = command.body(options, words), options.timeout
    if seconds is None and body.get("drain_seconds"):
        from dynamo_vllm.serving.admin.client import SECONDS

        seconds = SECONDS[command.verb] + body["drain_seconds"]
    asked = {i: asyncio.ensure_future(workers.ask(i, command.verb, body, seconds)) for i in names}
    if command.verb == "load_lora":
        from dynamo_vllm.cli.running.adapter_progress import show

        await show(workers, words[0], asked, names, sys.stderr)
    return {instance: await reply for instance, reply in asked.items()}


# --- the report -------------------------------------------------------------------------------------------


def report(
    name: str,
    command: Command,
    options: AdminOptions,
    replies: Mapping[int, Reply],
    names: Mapping[int, str],
) -> None:
    if options.json:
        found = [{"worker": names[i], "instance": i, **reply} for i, reply in replies.items()]
        print(json.dumps({"verb": command.verb, "workers": found}, indent=2))
        return
    if command.verb == "list_loras":
        print(adapters(replies, names))
    for instance, reply in replies.items():
        if reply.get("status") != "success":
            print(f"{names[instance]}: {refusal(reply)}", file=sys.stderr)
        elif command.verb != "list_loras":
            print(f"{names[instance]}: {command.describe(reply)}")


def refusal(reply: Reply) -> str:
    """Say why a worker refused."""
    message = str(reply.get("message") or "no reason given")
    if reply.get("error") in ("unreachable", "no_answer"):
        return message
    return f"refused ({reply.get('code', '?')} {reply.get('error', 'error')}): {message}"


def adapters(replies: Mapping[int, Reply], names: Mapping[int, str]) -> str:
    from dynamo_vllm.cli.running.adapter_progress import progress
    from dynamo_vllm.cli.running.frontend_client import table

    rows: list[Sequence[object]] = []
    answered = [(i, reply) for i, reply in replies.items() if reply.get("status") == "success"]
    for instance, reply in answered:
        for entry in reply.get("loras", ()):
            facts = (entry.get("rank") or "-", entry.get("leases", 0), entry.get("uri") or "-")
            rows.append((names[instance], entry.get("name"), progress(entry), *facts))
    used = [
        f"{names[i]} has {reply.get('count', 0)} of {reply.get('capacity', '?')}" for i, reply in answered
    ]
    lines = [table(("WORKER", "ADAPTER", "STATE", "RANK", "IN USE", "SOURCE"), rows)] if rows else []
    return "\n".join([*lines, "; ".join(used)])
