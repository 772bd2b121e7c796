"""Guides are judged in processes with a limit of time and of memory, which others need not wait for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from dynamo_vllm.engine.structured_output import judge as structured_output_judge
from dynamo_vllm.engine.structured_output import lane as structured_output_lane
from dynamo_vllm.engine.structured_output.gate import GuideGate
from dynamo_vllm.engine.structured_output.judge import Guides, Limits
from dynamo_vllm.engine.structured_output.judge_processes import Source
from dynamo_vllm.errors import InvalidRequest, Overloaded
from dynamo_vllm.job import Guide, Job, SamplingSpec
from harness.guides import FAILS, LATE, LATE_SECONDS, LOAD
from harness.processes import survivors
from harness.stack import TESTS
from harness.waiting import until

LIMITS = Limits(seconds=0.2, memory_bytes=64 << 20)
BURN = "burn 60"


def environment() -> dict[str, str]:
    modules = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(modules)}


class Judged:
    """A judge whose processes tell a folder what they were asked."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, call: str = LOAD) -> None:
        self.folder = folder
        self.source = Source(call, str(folder).encode(), environment())
        self.guides = Guides(self.source, limits)

    async def __call__(self, regex: str) -> Guide:
        return await self.guides.judged(Guide(regex=regex))

    def seen(self, what: str) -> list[int]:
        """The pids that were asked for it, in turn."""
        path = self.folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def begun(self, what: str, count: int = 1) -> None:
        await asyncio.to_thread(until, what, lambda: len(self.seen(what)) >= count, 60)


@pytest.fixture(autouse=True)
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits are of processor time, which nobody else can take."""
    monkeypatch.setattr(structured_output_judge, "QUICK_SECONDS", 0.05)


@pytest.fixture
async def judged(tmp_path: Path) -> AsyncIterator[Judged]:
    made = Judged(tmp_path)
    yield made
    await ended(made)


async def ended(made: Judged) -> None:
    below = psutil.Process().children(recursive=True)
    made.guides.close()
    assert await asyncio.to_thread(survivors, below) == []


async def test_guide_comes_back_with_what_the_check_made_of_it(judged: Judged) -> None:
    assert await judged("plain") == Guide(regex="plain", backend="a")
    assert await judged("become g") == Guide(grammar="g", backend="a"), "and of other fields nothing"


async def test_refusal_names_the_field(judged: Judged) -> None:
    with pytest.raises(InvalidRequest, match="^guided_regex: not like this$"):
        await judged("refuse not like this")
    with pytest.raises(InvalidRequest, match="its compiler failed .KeyError"):
        await judged("panic")


async def test_guide_that_takes_too_long_is_refused(judged: Judged) -> None:
    with pytest.raises(InvalidRequest, match="guided_regex: takes more than 0.2 s to compile; use fewer"):
        await judged(BURN)
    quick, slow = judged.seen("burn")
    assert quick != slow, "first in the quick lane, then in the other one"
    assert await judged("burn 0.1") == Guide(regex="burn 0.1", backend="burnt"), "within the limit"


async def test_guide_that_takes_too_much_memory_is_refused_and_smaller_ones_are_not(judged: Judged) -> None:
    with pytest.raises(InvalidRequest, match="guided_regex: takes more than 64 MB to compile"):
        await judged("take 100")
    assert (await judged("take 40")).backend == "took 40"
    assert (await judged("take 41")).backend == "took 41"


async def test_what_was_found_is_known(judged: Judged) -> None:
    for _ in range(3):
        await judged("plain")
        with pytest.raises(InvalidRequest, match="as it is"):
            await judged("refuse as it is")
        with pytest.raises(InvalidRequest, match="s to compile"):
            await judged(BURN)
    assert [len(judged.seen(what)) for what in ("plain", "refuse", "burn")] == [1, 1, 2]


async def test_what_is_known_has_an_end(judged: Judged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output_judge, "KEPT_GUIDES", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        await judged(regex)
    assert [len(judged.seen(what)) for what in "abc"] == [1, 2, 1], "the one not asked for the longest goes"
    monkeypatch.setattr(structured_output_judge, "KEPT_BYTES", 1000)
    await judged("become " + "x" * 5000)
    await judged("a")
    assert len(judged.seen("a")) == 2


async def test_same_guide_at_once_is_judged_once(judged: Judged, tmp_path: Path) -> None:
    same = [asyncio.create_task(judged(f"wait {tmp_path / 'go'}")) for _ in range(5)]
    await judged.begun("wait")
    same[0].cancel()  # whoever had it judged leaves
    await judged.begun("wait", 2)
    (tmp_path / "go").touch()
    assert [(await one).backend for one in same[1:]] == ["waited"] * 4
    assert len(judged.seen("wait")) == 2


async def test_others_go_on_while_a_hostile_guide_burns_its_time(tmp_path: Path) -> None:
    judged = Judged(tmp_path, Limits(seconds=20.0, memory_bytes=64 << 20))
    hostile = asyncio.create_task(judged(BURN))
    await judged.begun("burn", 2)  # it is in the slow lane now
    assert [(await judged(f"plain {n}")).backend for n in range(20)] == ["a"] * 20
    assert not hostile.done()
    hostile.cancel()
    await ended(judged)


async def test_smallest_comes_first_whoever_came_before(judged: Judged, tmp_path: Path) -> None:
    first = asyncio.create_task(judged(f"wait {tmp_path / 'go'}"))
    await judged.begun("wait")
    order: list[str] = []

    async def ask(regex: str) -> None:
        await judged(regex)
        order.append(regex.split()[0])

    async with asyncio.TaskGroup() as tasks:
        for regex in ("large " + "x" * 500, "medium " + "x" * 50, "small"):
            tasks.create_task(ask(regex))
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
    await first
    assert order == ["small", "medium", "large"]


async def test_client_that_leaves_ends_the_judging(judged: Judged) -> None:
    gate = GuideGate(judged.guides)
    job = Job("j", [1], SamplingSpec(max_tokens=1, guide=Guide(regex="wait for nothing")))
    asked = asyncio.create_task(gate.admitted(job))
    await judged.begun("wait")
    (pid,) = judged.seen("wait")
    gate.leave("j")
    assert await asked is None
    await asyncio.to_thread(until, "its end", lambda: not psutil.pid_exists(pid), 30)
    plain = Job("k", [1], SamplingSpec(max_tokens=1, guide=Guide(regex="plain")))
    admitted = await gate.admitted(plain)
    assert admitted is not None and admitted.sampling.guide == Guide(regex="plain", backend="a")


async def test_queue_is_bounded_and_whoever_leaves_it_makes_room(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structured_output_lane.MOST_WAITING, "quick", 2)
    running = asyncio.create_task(judged(f"wait {tmp_path / 'go'}"))
    await judged.begun("wait")
    waiting = [asyncio.create_task(judged(f"plain {n}")) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many guides wait"):
        await judged("one more")
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    another = asyncio.create_task(judged("another"))
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    assert [(await one).backend for one in (running, waiting[1], another)] == ["waited", "a", "a"]


async def test_guide_whose_turn_does_not_come_is_no_fault_of_the_client(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await judged("plain")
    monkeypatch.setattr(structured_output_judge, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(structured_output_judge, "WAIT_SHARE", 0.0)
    with pytest.raises(Overloaded, match=r"guided_regex: not judged within 0.1 s; try again"):
        await judged(f"wait {tmp_path / 'go'}")
    (tmp_path / "go").touch()
    monkeypatch.setattr(structured_output_judge, "WAIT_SECONDS", 60.0)
    assert (await judged(f"wait {tmp_path / 'go'}")).backend == "waited", "and nothing is kept of it"


async def test_killed_judge_is_replaced(judged: Judged) -> None:
    await judged("plain")
    (first,) = judged.seen("plain")
    with pytest.raises(Overloaded, match="was killed; try again"):
        await judged(f"die {signal.SIGKILL:d}")
    await judged("plain again")
    assert judged.seen("plain")[1] != first
    with pytest.raises(InvalidRequest, match="its compiler failed; use fewer"):
        await judged(f"die {signal.SIGSEGV:d}")
    await judged("plain a third time")
    idle = judged.seen("plain")[-1]
    os.kill(idle, signal.SIGKILL)
    await asyncio.to_thread(until, "its end", lambda: psutil.Process(idle).status() == "zombie", 30)
    await judged("plain a fourth time")


async def test_judge_that_was_killed_a_moment_ago_is_no_error_of_the_next_guide(judged: Judged) -> None:
    for n in range(20):
        await judged(f"plain {n}")
        os.kill(judged.seen("plain")[-1], signal.SIGKILL)  # and not waited for


async def test_closing_ends_whoever_waits_for_an_answer(tmp_path: Path) -> None:
    judged = Judged(tmp_path, Limits(seconds=600.0, memory_bytes=64 << 20))
    asked = asyncio.create_task(judged("wait for nothing"))
    await judged.begun("wait")
    waiting = asyncio.create_task(judged("plain"))
    await asyncio.sleep(0)
    await ended(judged)
    async with asyncio.timeout(60):  # a guide may wait for 3030 s here
        for one in (asked, waiting):
            with pytest.raises(Overloaded):
                await one


async def test_time_that_judges_take_to_start_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output_judge, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(structured_output_judge, "WAIT_SHARE", 1.0)
    judged = Judged(tmp_path, Limits(seconds=LATE_SECONDS * 0.9, memory_bytes=64 << 20), call=LATE)
    assert (await judged("plain")).backend == "a"
    await ended(judged)


async def test_source_of_judges_is_replaced(judged: Judged) -> None:
    await judged("plain")
    (judge,) = judged.seen("plain")
    (source,) = [child for child in psutil.Process().children() if child.pid != judge]
    source.kill()
    with pytest.raises(Overloaded, match="was killed"):
        await judged(f"die {signal.SIGKILL:d}")
    assert (await judged("plain 2")).backend == "a"


async def test_judges_that_cannot_load_are_an_error_of_the_worker(tmp_path: Path) -> None:
    judged = Judged(tmp_path, call=FAILS)
    for _ in range(2):
        with pytest.raises(Overloaded, match="guides cannot be judged: ValueError: no tokenizer in"):
            await judged("plain")
    await ended(judged)


async def test_judge_ends_with_the_guide_that_wears_it_out(
    judged: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(501):
        await judged(f"plain {n}")
    pids = judged.seen("plain")
    assert len(set(pids[:500])) == 1 and pids[500] != pids[0]
