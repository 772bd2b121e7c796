"""Tests that guides are checked in processes with limits of CPU time and memory, and do not block others."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dynamo_vllm.engine.structured_output import checker as structured_output_checker
from dynamo_vllm.engine.structured_output import lane as structured_output_lane
from dynamo_vllm.engine.structured_output.checker import GuideChecker, Limits
from dynamo_vllm.engine.structured_output.checker_processes import Source
from dynamo_vllm.engine.structured_output.gate import GuideGate
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


class Checked:
    """Has a checker whose processes record in a folder what they were asked."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, call: str = LOAD) -> None:
        self.folder = folder
        self.source = Source(call, str(folder).encode(), environment())
        self.guides = GuideChecker(self.source, limits)

    async def __call__(self, regex: str) -> Guide:
        return await self.guides.checked(Guide(regex=regex))

    def seen(self, what: str) -> list[int]:
        """Returns the pids that were asked for it, in order."""
        path = self.folder / what
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    async def begun(self, what: str, count: int = 1) -> None:
        await asyncio.to_thread(until, what, lambda: len(self.seen(what)) >= count, 60)


@pytest.fixture(autouse=True)
def short_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the limit, which is CPU time: other programs on the machine cannot use it up."""
    monkeypatch.setattr(structured_output_checker, "QUICK_SECONDS", 0.05)


@pytest.fixture
async def checked(tmp_path: Path) -> AsyncIterator[Checked]:
    made = Checked(tmp_path)
    yield made
    await ended(made)


async def ended(made: Checked) -> None:
    below = psutil.Process().children(recursive=True)
    made.guides.close()
    assert await asyncio.to_thread(survivors, below) == []


async def test_checked_guide_has_the_changes_of_the_check_and_a_refusal_names_the_field(
    checked: Checked,
) -> None:
    assert await checked("plain") == Guide(regex="plain", backend="a")
    assert await checked("become g") == Guide(grammar="g", backend="a"), "and of other fields nothing"
    with pytest.raises(InvalidRequest, match="^guided_regex: not like this$"):
        await checked("refuse not like this")
    with pytest.raises(InvalidRequest, match="its compiler failed .KeyError"):
        await checked("panic")


async def test_guide_that_takes_too_much_memory_is_refused_and_smaller_ones_are_not(tmp_path: Path) -> None:
    checked = Checked(tmp_path, replace(LIMITS, seconds=60))  # new pages take long on some machines
    with pytest.raises(InvalidRequest, match="guided_regex: takes more than 64 MB to compile"):
        await checked("take 100")
    assert (await checked("take 40")).backend == "took 40"
    assert (await checked("take 41")).backend == "took 41"
    await ended(checked)


async def test_guide_that_takes_too_long_is_refused_and_results_are_cached(checked: Checked) -> None:
    for _ in range(3):
        await checked("plain")
        with pytest.raises(InvalidRequest, match="as it is"):
            await checked("refuse as it is")
        with pytest.raises(InvalidRequest, match="guided_regex: takes more than 0.2 s to compile; use fewer"):
            await checked(BURN)
    assert [len(checked.seen(what)) for what in ("plain", "refuse", "burn")] == [1, 1, 2]
    quick, slow = checked.seen("burn")
    assert quick != slow, "first in the quick lane, then in the other one"
    assert await checked("burn 0.1") == Guide(regex="burn 0.1", backend="burnt"), "within the limit"


async def test_cache_of_results_is_bounded(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output_checker, "KEPT_GUIDES", 2)
    for regex in ("a", "b", "a", "c", "a", "b"):
        await checked(regex)
    assert [len(checked.seen(what)) for what in "abc"] == [1, 2, 1], "the one not asked for the longest goes"
    monkeypatch.setattr(structured_output_checker, "KEPT_BYTES", 1000)
    await checked("become " + "x" * 5000)
    await checked("a")
    assert len(checked.seen("a")) == 2


async def test_same_guide_at_once_is_checked_once(checked: Checked, tmp_path: Path) -> None:
    same = [asyncio.create_task(checked(f"wait {tmp_path / 'go'}")) for _ in range(5)]
    await checked.begun("wait")
    same[0].cancel()  # whoever had it checked leaves
    await checked.begun("wait", 2)
    (tmp_path / "go").touch()
    assert [(await one).backend for one in same[1:]] == ["waited"] * 4
    assert len(checked.seen("wait")) == 2


async def test_others_continue_while_a_hostile_guide_uses_its_time(tmp_path: Path) -> None:
    checked = Checked(tmp_path, Limits(seconds=20.0, memory_bytes=64 << 20))
    hostile = asyncio.create_task(checked(BURN))
    await checked.begun("burn", 2)  # it is in the slow lane now
    assert [(await checked(f"plain {n}")).backend for n in range(5)] == ["a"] * 5
    assert not hostile.done()
    hostile.cancel()
    await ended(checked)


async def test_smallest_guide_goes_first(checked: Checked, tmp_path: Path) -> None:
    first = asyncio.create_task(checked(f"wait {tmp_path / 'go'}"))
    await checked.begun("wait")
    order: list[str] = []

    async def ask(regex: str) -> None:
        await checked(regex)
        order.append(regex.split()[0])

    async with asyncio.TaskGroup() as tasks:
        for regex in ("large " + "x" * 500, "medium " + "x" * 50, "small"):
            tasks.create_task(ask(regex))
        await asyncio.sleep(0)
        (tmp_path / "go").touch()
    await first
    assert order == ["small", "medium", "large"]


async def test_client_that_leaves_ends_the_check(checked: Checked) -> None:
    gate = GuideGate(checked.guides)
    job = Job("j", [1], SamplingSpec(max_tokens=1, guide=Guide(regex="wait for nothing")))
    asked = asyncio.create_task(gate.admitted(job))
    await checked.begun("wait")
    (pid,) = checked.seen("wait")
    gate.leave("j")
    assert await asked is None
    await asyncio.to_thread(until, "its end", lambda: not psutil.pid_exists(pid), 30)
    plain = Job("k", [1], SamplingSpec(max_tokens=1, guide=Guide(regex="plain")))
    admitted = await gate.admitted(plain)
    assert admitted is not None and admitted.sampling.guide == Guide(regex="plain", backend="a")


async def test_queue_is_bounded_and_a_cancelled_guide_leaves_it(
    checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structured_output_lane.MOST_WAITING, "quick", 2)
    running = asyncio.create_task(checked(f"wait {tmp_path / 'go'}"))
    await checked.begun("wait")
    waiting = [asyncio.create_task(checked(f"plain {n}")) for n in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="too many guides are waiting"):
        await checked("one more")
    waiting[0].cancel()
    await asyncio.wait([waiting[0]])
    another = asyncio.create_task(checked("another"))
    await asyncio.sleep(0)
    (tmp_path / "go").touch()
    assert [(await one).backend for one in (running, waiting[1], another)] == ["waited", "a", "a"]


async def test_guide_that_waits_too_long_is_an_overload_error(
    checked: Checked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await checked("plain")
    monkeypatch.setattr(structured_output_checker, "WAIT_SECONDS", 0.1)
    monkeypatch.setattr(structured_output_checker, "WAIT_SHARE", 0.0)
    with pytest.raises(Overloaded, match=r"guided_regex: not checked within 0.1 s; try again"):
        await checked(f"wait {tmp_path / 'go'}")
    (tmp_path / "go").touch()
    monkeypatch.setattr(structured_output_checker, "WAIT_SECONDS", 60.0)
    assert (await checked(f"wait {tmp_path / 'go'}")).backend == "waited", "and nothing is kept of it"


async def test_killed_checker_and_what_it_is_forked_from_are_replaced(checked: Checked) -> None:
    await checked("plain")
    (first,) = checked.seen("plain")
    with pytest.raises(Overloaded, match="was killed; try again"):
        await checked(f"die {signal.SIGKILL:d}")
    await checked("plain again")
    assert checked.seen("plain")[1] != first
    with pytest.raises(InvalidRequest, match="its compiler failed; use fewer"):
        await checked(f"die {signal.SIGSEGV:d}")
    await checked("plain a third time")
    idle = checked.seen("plain")[-1]
    os.kill(idle, signal.SIGKILL)
    await asyncio.to_thread(until, "its end", lambda: psutil.Process(idle).status() == "zombie", 30)
    await checked("plain a fourth time")
    checker = checked.seen("plain")[-1]
    (source,) = [child for child in psutil.Process().children() if child.pid != checker]
    source.kill()
    with pytest.raises(Overloaded, match="was killed"):
        await checked(f"die {signal.SIGKILL:d} ")
    assert (await checked("plain a fifth time")).backend == "a"


async def test_checker_that_was_just_killed_does_not_fail_the_next_guide(checked: Checked) -> None:
    for n in range(8):
        await checked(f"plain {n}")
        os.kill(checked.seen("plain")[-1], signal.SIGKILL)  # and not waited for


async def test_close_ends_waiting_requests(tmp_path: Path) -> None:
    checked = Checked(tmp_path, Limits(seconds=600.0, memory_bytes=64 << 20))
    asked = asyncio.create_task(checked("wait for nothing"))
    await checked.begun("wait")
    waiting = asyncio.create_task(checked("plain"))
    await asyncio.sleep(0)
    await ended(checked)
    async with asyncio.timeout(60):  # a guide may wait for 3030 s here
        for one in (asked, waiting):
            with pytest.raises(Overloaded):
                await one


async def test_time_that_checkers_take_to_start_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output_checker, "WAIT_SECONDS", 0.0)
    monkeypatch.setattr(structured_output_checker, "WAIT_SHARE", 1.0)
    checked = Checked(tmp_path, Limits(seconds=LATE_SECONDS * 0.9, memory_bytes=64 << 20), call=LATE)
    assert (await checked("plain")).backend == "a"
    await ended(checked)


async def test_checkers_that_cannot_load_are_an_error_of_the_worker(tmp_path: Path) -> None:
    checked = Checked(tmp_path, call=FAILS)
    for _ in range(2):
        with pytest.raises(Overloaded, match="guides cannot be checked: ValueError: no tokenizer in"):
            await checked("plain")
    await ended(checked)


async def test_checker_is_replaced_after_its_last_guide(checked: Checked) -> None:
    for n in range(501):
        await checked(f"plain {n}")
    pids = checked.seen("plain")
    assert len(set(pids[:500])) == 1 and pids[500] != pids[0]
