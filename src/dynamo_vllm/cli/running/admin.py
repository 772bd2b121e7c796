"""Runs the commands that control running workers, such as `lora load` and `sleep`, from one table."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.cli.process import ask_quietly
from dynamo_vllm.cli.running import deployment
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
from dynamo_vllm.observe import verbs, worker_names

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.serving.admin.client import Workers

    Reply = dict[str, Any]

PROG = "dynamo-vllm"


@dataclass(frozen=True, slots=True)
class Command:
    """One command: the admin verb that it calls, and its arguments."""

    verb: str
    about: str
    options: type[AdminOptions] = AdminOptions
    words: tuple[str, ...] = ()
    """Names of the command's positional arguments."""
    body: Callable[[Any, Sequence[str]], dict[str, Any]] = lambda options, words: {}

    @property
    def everywhere(self) -> bool:
        """Return whether it calls every worker unless one is named."""
        return self.verb in verbs.EVERYWHERE

    @property
    def target(self) -> str:
        if self.everywhere:
            return "It applies to every worker, unless --worker names one."
        return "With several workers, give --all or --worker ID."


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
        words=("NAME", "URI"),
        body=lambda options, words: {"lora_name": words[0], "source": {"uri": source(words[1])}},
    ),
    "lora unload": Command(
        "unload_lora",
        "Unload an adapter once no request uses it any more.",
        words=("NAME",),
        body=lambda options, words: {"lora_name": words[0]},
    ),
    "lora list": Command(
        "list_loras",
        "Show the adapters of the workers.",
    ),
    "sleep": Command(
        "sleep",
        "Take workers out of service and free the memory of their engines.",
        options=SleepOptions,
        body=lambda options, words: _drain(options, {"level": options.level}),
    ),
    "wake": Command("wake_up", "Wake sleeping workers and put them back into service."),
    "pause": Command(
        "pause",
        "Pause workers; everything stays in memory.",
        options=PauseOptions,
        body=lambda options, words: _drain(options, {"mode": "keep" if options.keep else "wait"}),
    ),
    "resume": Command("resume", "Resume paused workers."),
    "clear-kv": Command("clear_kv_blocks", "Clear every cached KV block."),
    "reset-caches": Command(
        "reset_caches",
        "Clear caches: KV blocks, processed media, encoder outputs.",
        options=ResetOptions,
        body=lambda options, words: {"kinds": list(dict.fromkeys(options.kind))},
    ),
    "profile start": Command(
        "start_profile",
        "Start a profile of the engine; the worker must have been started with vLLM's --profiler-config.",
        options=ProfileOptions,
        body=lambda options, words: {} if options.prefix is None else {"prefix": options.prefix},
    ),
    "profile stop": Command(
        "stop_profile",
        "Stop the profile and write it.",
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
    body = command.body(options, words)
    seconds = verbs.seconds_for(command.verb, body, options.timeout)
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
            print(f"{names[instance]}: {verbs.refusal(reply)}", file=sys.stderr)
        elif command.verb != "list_loras":
            print(f"{names[instance]}: {verbs.said(command.verb, reply)}")


def adapters(replies: Mapping[int, Reply], names: Mapping[int, str]) -> str:
    from dynamo_vllm.cli.running.adapter_progress import progress
    from dynamo_vllm.cli.tables import table

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
