"""Measures cold starts by turns: from the start of a command to its first answered request."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import processes
from harness.processes import StartFailed
from peers import peers
from peers.environments import Environments
from peers.match import Record, say
from peers.settings import CPU_VARIABLES, Setting

PAUSE_SECONDS = 0.05


@dataclass(frozen=True)
class Way:
    """A command as a user types it."""

    title: str
    peer: peers.Peer
    setting: Setting


def ways(setting: Setting) -> list[Way]:
    """With their own choice of processes first; `vllm serve` also with the one that ours makes by itself."""
    free = dataclasses.replace(
        setting,
        flags=without(setting.flags, "--distributed-executor-backend"),
        variables={
            name: value
            for name, value in setting.variables.items()
            if name not in CPU_VARIABLES or name == "VLLM_CPU_KVCACHE_SPACE"
        },
    )
    found = [
        Way("`dynamo-vllm serve`", peers.COLD["ours"], free),
        Way("`vllm serve`", peers.COLD["vllm"], free),
    ]
    if free != setting:
        found.append(Way("`vllm serve`, engine in one process", peers.COLD["vllm"], setting))
    return found


def without(flags: Sequence[str], name: str) -> tuple[str, ...]:
    """The flags less one that has a value."""
    kept = list(flags)
    if name in kept:
        at = kept.index(name)
        del kept[at : at + 2]
    return tuple(kept)


def play(setting: Setting, environments: Environments, folder: Path, times: int, record: Record) -> None:
    found = ways(setting)
    for number in range(times):
        for index, way in enumerate(found if number % 2 == 0 else found[::-1]):
            try:
                seconds = first_answer(way, environments, folder / f"cold-{number}-{index}")
            except StartFailed as exc:
                say(f"cold start of {way.title} FAILED: {exc}")
                continue
            record.cold.append({"title": way.title, "round": number, "seconds": seconds})
            record.save()
            say(f"cold start {number + 1} of {times}, {way.title}: {seconds:.1f} s")


def first_answer(way: Way, environments: Environments, folder: Path) -> float:
    place = peers.Place(environments.python("own"), way.setting, folder, processes.free_port())
    (part,) = way.peer.parts(place)
    folder.mkdir(parents=True, exist_ok=True)
    env = way.setting.environment() | part.variables
    env |= {"DYN_FILE_KV": str(folder / "discovery"), "XDG_CACHE_HOME": str(folder)}
    url = f"http://127.0.0.1:{place.port}"
    began = time.monotonic()
    process = processes.start(part.label, part.command, folder / f"{part.label}.log", env)
    try:
        peers.wait_for_answer(way.title, url, [process], way.setting.start_seconds, PAUSE_SECONDS)
        return time.monotonic() - began
    finally:
        processes.stop([process], peers.STOP_SECONDS)
