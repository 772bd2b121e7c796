"""Load tests as processes of the console."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import psutil

from dynamo_vllm.console.data import bench
from dynamo_vllm.console.data.bench import Bench, BenchRequest
from harness.refusals import refused

REPORT = """
import sys, json
row = {"stage": "c=8", "number": 1, "seconds": 5.0, "ok": 12, "failed": 1, "tokens_per_second": 250.0}
print(json.dumps({**row, "ttft_ms": {"p50": 7.5, "p99": 9.0}}), file=sys.stderr)
print(json.dumps({"stages": [{"words": sys.argv[1:]}]}))
"""
WAITS = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=-3, stderr=-3)
print(f"below {below.pid}", file=sys.stderr, flush=True)
print('{"stage": "c=8", "number": 1, "seconds": 1.0, "ok": 1}', file=sys.stderr, flush=True)
signal.pause()
"""
FAILS = "import sys; sys.exit('error: nothing listens there')"


class Told:
    def __init__(self, script: str) -> None:
        self.states: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.bench = Bench("http://f", self._publish, dict(os.environ), (sys.executable, "-c", script))

    def _publish(self, event: str, value: object) -> None:
        assert event == "bench" and isinstance(value, dict)
        self.states.put_nowait(value)

    async def until(self, wanted: str) -> dict[str, Any]:
        while (state := await self.states.get())["state"] != wanted:
            pass
        return state


ASKED = BenchRequest(model="tiny", requests=10)


async def running() -> Told:
    """A load test with a process of its own, which goes on until it is stopped."""
    told = Told(WAITS)
    await told.bench.start(ASKED)
    while not told.bench.state()["progress"]:
        await told.states.get()
    return told


async def test_load_test_shows_progress_and_then_its_stages() -> None:
    told = Told(REPORT)
    assert told.bench.state()["state"] == "idle"
    started = await told.bench.start(ASKED)
    done = await told.until("done")
    assert done["id"] == started["id"]
    assert done["progress"][0] == {
        **{"at": done["progress"][0]["at"], "done": 12, "failed": 1},
        **{"requests_per_second": 2.4, "output_tokens_per_second": 250.0, "ttft_ms": 7.5, "stage": "c=8"},
    }
    assert done["stages"][0]["words"] == [
        *("http://f", "--model=tiny", "--concurrency=8", "--json=-", "--progress=json"),
        *("--requests=10", "--input-tokens=128", "--output-tokens=64", "--prompts=random"),
    ]
    assert done["asked"]["requests"] == 10 and done["error"] is None


async def test_second_one_waits_and_a_stopped_one_leaves_nothing() -> None:
    told = await running()
    with refused(409):
        await told.bench.start(ASKED)
    below = psutil.Process().children(recursive=True)
    assert len(below) == 2
    assert (await told.bench.stop())["state"] == "stopped"
    assert psutil.wait_procs(below, timeout=30)[1] == []
    with refused(409):
        await told.bench.stop()


async def test_end_of_the_console_ends_it() -> None:
    told = await running()
    below = psutil.Process().children(recursive=True)
    await told.bench.close()
    assert psutil.wait_procs(below, timeout=30)[1] == []


async def test_failure_is_said_in_its_own_words() -> None:
    told = Told(FAILS)
    await told.bench.start(ASKED)
    assert (await told.until("failed"))["error"] == "nothing listens there"


async def test_what_cannot_run_is_refused() -> None:
    told = Told(REPORT)
    for request in (
        BenchRequest(model="m"),
        BenchRequest(model="m", requests=1, seconds=1),
        BenchRequest(model="m", requests=0),
        BenchRequest(model="m", seconds=1e9),
        BenchRequest(model="m", requests=1, input_tokens=-1),
        *(BenchRequest(model="m", requests=1, concurrency=text) for text in ("8;ls", "\u0663")),
        *(BenchRequest(model=name, requests=1) for name in ("--json", "", "a\0b", "m" * 2000)),
    ):
        with refused(400):
            await told.bench.start(request)
        assert told.bench.state()["state"] == "idle", "the next one can run"


def test_other_lines_are_no_progress() -> None:
    for line in ("warming up", '{"message": "x"}', "[1]", "error: 5 s", "{"):
        assert bench.figures(line) is None, line


def test_rate_is_that_since_the_row_before_of_the_same_stage() -> None:
    first = {"stage": "a", "number": 1, "seconds": 2.0, "ok": 10}
    second = {"stage": "a", "number": 1, "seconds": 3.0, "ok": 16}
    other = {"stage": "b", "number": 2, "seconds": 1.0, "ok": 3}
    assert bench.row(first, None)["requests_per_second"] == 5.0
    assert bench.row(second, first)["requests_per_second"] == 6.0
    assert bench.row(other, second)["requests_per_second"] == 3.0
