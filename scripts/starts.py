"""Times `serve`: to its ready line, for each further worker, and from a killed engine to the next answer.

python scripts/starts.py [--rounds 3] [--workers 3] [--kills 20] [--pause 61] [words for serve …]

Rounds alternate one worker and several. Kills are at least `--pause` seconds apart, because `serve` waits
before it replaces a process that fails again and again. Without a model the demo is served.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import httpx

from harness import processes, served
from harness.served import Serving

ANSWER_SECONDS = 120


def kill_engine(serving: Serving) -> float:
    """Kill an engine core; return the seconds until the next answer."""
    serving.engine_core().kill()
    began = time.monotonic()
    processes.wait_until("an answer", [serving.process], lambda: answers(serving), ANSWER_SECONDS)
    return time.monotonic() - began


def answers(serving: Serving) -> bool:
    body = {"model": serving.models[0], "prompt": "Hello", "max_tokens": 2}
    try:
        return serving.stack.post("/v1/completions", body).status_code == 200
    except httpx.TransportError:
        return False


def memory(serving: Serving) -> str:
    """Return memory that only one process has (unique), and with shared pages counted once (proportional)."""
    found = []
    for process in serving.below():
        info = process.memory_full_info()
        found.append(f"{process.name()} {info.uss >> 20}/{info.pss >> 20}")
    return ", ".join(found)


@contextlib.contextmanager
def started(folder: Path, *words: str) -> Iterator[tuple[Serving, float]]:
    """Start `serve`; yield it when ready, with the seconds that took."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    serving = served.start(folder, *words, "--run-dir", str(folder / "run"), env=os.environ)
    try:
        serving.wait_ready(every=0.02)
        yield serving, time.monotonic() - began
    finally:
        serving.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="starts with one worker, and with several")
    parser.add_argument("--workers", type=int, default=3, help="workers of the second kind of start")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pause", type=float, default=61.0, help="seconds between two kills")
    options, words = parser.parse_known_args()
    one, several = list[float](), list[float]()
    with tempfile.TemporaryDirectory() as name:
        os.environ.setdefault("XDG_CACHE_HOME", name)
        for number in range(options.rounds):
            for count, into in ((1, one), (options.workers, several))[:: 1 if number % 2 else -1]:
                if count == options.workers == 1 and into is several:
                    continue
                folder = Path(name, f"{number}-{count}")
                with started(folder, *words, "--workers", str(count)) as (serving, seconds):
                    into.append(seconds)
                    print(f"{count} workers: ready after {seconds:.1f} s", flush=True)
                    print(f"  MB unique/proportional: {memory(serving)}", flush=True)
        if one and several:
            more = (statistics.median(several) - statistics.median(one)) / (options.workers - 1)
            print(f"ready: {show(one)}; each further worker {more:+.1f} s", flush=True)
        if options.kills:
            after = list[float]()
            with started(Path(name, "kills"), *words) as (serving, _):
                for number in range(options.kills):
                    if number:
                        time.sleep(options.pause)
                    after.append(kill_engine(serving))
                    print(f"kill {number + 1}: answered again after {after[-1]:.1f} s", flush=True)
            print(f"after a kill: {show(after)}")


def show(seconds: list[float]) -> str:
    middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"median {middle:.1f} s ({least:.1f} to {most:.1f}) of {len(seconds)}"


if __name__ == "__main__":
    main()
