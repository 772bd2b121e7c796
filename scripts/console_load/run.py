"""Runs the console beside 100 workers and 1,000 requests per second, and prints what it costs each minute.

python scripts/console_load [--minutes 30] [--workers 100] [--requests 1000] [--blocks 1000] [--no-page]

`serve` starts four workers with the fake engine and a console. The others are entries in discovery for which
these four answer. Records of requests and changes of caches go to the console's own receivers, because this
machine could not answer so many requests. The pages take turns, a minute each. CPU is that of the console's
process, in parts of one core; frames are those of the page in Chromium, which draws at most 60 a second.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from console_load import page as pages
from console_load.deployment import Copies
from console_load.traffic import EVENTS_SECONDS, RECORDS_SECONDS, Beat, Documents, Events, Records
from dynamo_vllm.serving.watch import request_trace
from harness.browser import FULL, PAGES
from harness.console import RealConsole, console
from harness.waiting import until

REAL = 4
FAKE = ("--engine", "fake", "--fake-engine", '{"vocab_size":2000,"token_ms":1,"cached":[{"count":1}]}')
SHOWN = ("", "requests", "caches", "performance", "operate")
MINUTE = 60


class Minute(NamedTuple):
    page: str
    cpu_percent: float
    resident_mb: float
    frames_per_second: float
    worst_ms: float
    heap_mb: float

    def line(self, number: int) -> str:
        drawn = f"{self.frames_per_second:7.1f} {self.worst_ms:9.0f} {self.heap_mb:8.1f}"
        return f"{number:6} {self.page:12} {self.cpu_percent:7.2f} {self.resident_mb:8.0f} {drawn}"


@contextlib.contextmanager
def served(folder: Path) -> Iterator[tuple[RealConsole, psutil.Process]]:
    discovery = str(folder / "discovery")
    with console(folder, *FAKE, groups=[{"count": REAL}], DYN_FILE_KV=discovery) as made:
        made.wait_for_workers(REAL)
        (found,) = [one for one in made.get("api/overview")["processes"] if one["kind"] == "console"]
        yield made, psutil.Process(found["pid"])


def seconds_of(process: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True)))


def measured(process: psutil.Process, page: pages.Page | None, name: str) -> Minute:
    before, began = seconds_of(process), time.monotonic()
    time.sleep(MINUTE)
    seconds = time.monotonic() - began
    drawn = page.look() if page is not None else pages.Drawn(0, 0.0, 0)
    return Minute(
        name,
        100 * (seconds_of(process) - before) / seconds,
        process.memory_info().rss / 1e6,
        drawn.frames / seconds,
        drawn.worst_ms,
        drawn.heap_bytes / 1e6,
    )


def last_words(made: RealConsole, folder: Path) -> str:
    """Return what `serve` said, and the end of the console's log."""
    logs = "".join(path.read_text() for path in sorted(folder.rglob("logs/console.log*")))
    return f"{made.serving.process.written()[-4000:]}\n{logs[-8000:]}"


def run(asked: argparse.Namespace, folder: Path) -> int:
    documents = Documents()
    with contextlib.ExitStack() as stack:
        made, process = stack.enter_context(served(folder))
        events = Events(documents, asked.blocks)
        stack.callback(events.close)
        copies = Copies(folder / "discovery", asked.workers - REAL, events.open)
        stack.callback(copies.close)
        events.begin(copies.publishers)
        until("all workers", lambda: len(made.workers()) == asked.workers, 120)
        url = process.environ()[request_trace.VARIABLE] + request_trace.PATH + "?name=measured"
        records = Records(url, copies.workers, documents, asked.requests)
        beats = [Beat(RECORDS_SECONDS, records.send)] if asked.requests else []
        beats += [Beat(EVENTS_SECONDS, events.send)] if asked.blocks else []
        for beat in beats:
            stack.enter_context(beat)
        page = None if asked.no_page else stack.enter_context(pages.opened(made.url))
        minutes: list[Minute] = []
        print(f"{'minute':6} {'page':12} {'cpu %':>7} {'MB':>8} {'frames':>7} {'worst ms':>9} {'heap MB':>8}")
        began = time.monotonic()
        try:
            for number in range(asked.minutes):
                place = SHOWN[number % len(SHOWN)]
                if page is not None:
                    page.show(place, FULL[place])
                minutes.append(measured(process, page, PAGES[place] if page else "closed"))
                print(minutes[-1].line(number + 1), flush=True)
        except psutil.NoSuchProcess:
            print(f"the console has ended:\n{last_words(made, folder)}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - began
        print(f"sent per second: {records.sent / seconds:.0f} records, {events.sent / seconds:.0f} blocks")
        print(f"cpu, median: {statistics.median(one.cpu_percent for one in minutes):.2f} %")
        for line in made.serving.process.written().splitlines():
            if "starting it again" in line or "it is tried again" in line:
                print(line)
        wrong = [str(beat.failure) for beat in beats if beat.failure is not None]
        wrong += [] if page is None else page.errors
        for one in wrong:
            print(one, file=sys.stderr)
    return 1 if wrong else 0


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=int, default=30)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--requests", type=float, default=1000, help="records per second")
    parser.add_argument("--blocks", type=float, default=1000, help="blocks per second that come or go")
    parser.add_argument("--no-page", action="store_true")
    with tempfile.TemporaryDirectory() as folder:
        return run(parser.parse_args(words), Path(folder))
