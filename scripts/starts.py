"""Times `serve`: to its ready line, for each further worker, and from a killed engine to the next answer.

python scripts/starts.py [--rounds 3] [--workers 3] [--kills 20] [--pause 61] [words for serve …]

Rounds alternate one worker and several. Kills are at least `--pause` seconds apart, because `serve` waits
before it replaces a process that fails again and again. Without a model the demo is served.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

START_SECONDS = 300
ANSWER_SECONDS = 120


class Served:
    """A running `serve`."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.out = folder / "out"
        self.out.parent.mkdir(parents=True)
        command = [sys.executable, "-m", "dynamo_vllm.cli.main", "serve", *words, "--port", str(port)]
        self.began = time.monotonic()
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--run-dir", str(folder / "run")], stdout=out, stderr=subprocess.STDOUT
            )

    def ready_seconds(self) -> float:
        while not (found := re.search(r"^ready: .* model=(\S+)", self.out.read_text(), re.M)):
            if self.process.poll() is not None or time.monotonic() - self.began > START_SECONDS:
                raise SystemExit(self.out.read_text()[-4000:])
            time.sleep(0.02)
        self.model = found[1]
        return time.monotonic() - self.began

    def kill_engine(self) -> float:
        """Seconds from the kill to the next answer."""
        below = psutil.Process(self.process.pid).children(recursive=True)
        next(p for p in below if "EngineCore" in " ".join(p.cmdline())).kill()
        began = time.monotonic()
        while not self._answers():
            if time.monotonic() - began > ANSWER_SECONDS:
                raise SystemExit(f"no answer after {ANSWER_SECONDS} s\n{self.out.read_text()[-4000:]}")
            time.sleep(0.02)
        return time.monotonic() - began

    def _answers(self) -> bool:
        body = json.dumps({"model": self.model, "prompt": "Hello", "max_tokens": 2}).encode()
        request = urllib.request.Request(
            f"{self.url}/v1/completions", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return bool(json.load(answer)["choices"])
        except (OSError, urllib.error.HTTPError):
            return False

    def memory(self) -> str:
        """What only one process has (unique) and all of it with shared pages counted once (proportional)."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            info = process.memory_full_info()
            found.append(f"{process.name()} {info.uss >> 20}/{info.pss >> 20}")
        return ", ".join(found)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


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
                served = Served(Path(name, f"{number}-{count}"), [*words, "--workers", str(count)])
                into.append(served.ready_seconds())
                print(f"{count} workers: ready after {into[-1]:.1f} s", flush=True)
                print(f"  MB unique/proportional: {served.memory()}", flush=True)
                served.stop()
        if one and several:
            more = (statistics.median(several) - statistics.median(one)) / (options.workers - 1)
            print(f"ready: {show(one)}; each further worker {more:+.1f} s", flush=True)
        if options.kills:
            served = Served(Path(name, "kills"), words)
            served.ready_seconds()
            seconds = list[float]()
            for number in range(options.kills):
                if number:
                    time.sleep(options.pause)
                seconds.append(served.kill_engine())
                print(f"kill {number + 1}: answered again after {seconds[-1]:.1f} s", flush=True)
            served.stop()
            print(f"after a kill: {show(seconds)}")


def show(seconds: list[float]) -> str:
    middle, least, most = statistics.median(seconds), min(seconds), max(seconds)
    return f"median {middle:.1f} s ({least:.1f} to {most:.1f}) of {len(seconds)}"


if __name__ == "__main__":
    main()
