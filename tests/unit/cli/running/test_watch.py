"""Showing something again and again."""

from __future__ import annotations

import io

import pytest

from dynamo_vllm.cli.running.watch import WatchScreen, frame, watch


class Stop(Exception):
    """The test has seen enough."""


class Time:
    """A clock that only sleeping moves, and looks that take long."""

    def __init__(self, *looks: float) -> None:
        self.now = 100.0
        self.looks = list(looks)
        self.looked_at: list[float] = []
        self.shown: list[str] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds

    async def look(self) -> str:
        if not self.looks:
            raise Stop
        self.looked_at.append(self.now)
        self.now += self.looks.pop(0)
        return f"at {self.now:g}"

    async def run(self, seconds: float) -> None:
        with pytest.raises(Stop):
            await watch(self.look, self.shown.append, seconds, self.clock, self.sleep)


async def test_looks_are_an_interval_apart_and_a_slow_one_is_followed_at_once_by_one() -> None:
    time = Time(0.5, 1.5, 0, 7, 0, 0)
    await time.run(2)
    assert time.looked_at == [100, 102, 104, 106, 113, 115]
    assert time.shown == [f"at {ended}" for ended in (100.5, 103.5, 104, 113, 113, 115)]


def test_picture_is_written_over_the_one_before_and_cut_to_the_terminal() -> None:
    assert frame("ab\nc", 80, 24) == "\x1b[Hab\x1b[K\r\nc\x1b[K\x1b[J"
    rows = frame("\n".join("x" * 50 for _ in range(10)), 20, 4).split("\r\n")
    assert len(rows) == 4
    assert rows[0] == "\x1b[H" + "x" * 19 + "\x1b[K"
    assert "… 7 more lines" in rows[-1]


def test_elsewhere_pictures_follow_each_other() -> None:
    stream = io.StringIO()
    with WatchScreen(stream, is_live=False) as screen:
        screen.show("one")
        screen.show("two")
    assert stream.getvalue() == "one\ntwo\n"
