"""What the page of the web console computes and draws beside many workers and requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import pytest

from harness.browser import Opened, show

Open = Callable[..., Opened]
SHARE_OF_IDLE = 0.5


@dataclass
class Window:
    """Two seconds of a page: its frames per second, and the part of the time that its own thread was idle."""

    frames: float
    free: float


@pytest.mark.more
def test_many_workers_and_requests_leave_time(
    opened: Open, record_property: Callable[[str, object], None]
) -> None:
    """How much the page itself computes, in processor time, to which other programs add nothing."""
    quiet, busy = windows(opened())
    record_property("quiet and busy", (quiet, busy))
    assert median(one.free for one in busy) >= SHARE_OF_IDLE * median(one.free for one in quiet)


@pytest.mark.long
def test_many_workers_and_requests_leave_frames(
    opened: Open, record_property: Callable[[str, object], None]
) -> None:
    """Frames depend on the whole machine: the stand-in that sends the requests is on it too."""
    quiet, busy = windows(opened())
    record_property("quiet and busy", (quiet, busy))
    assert median(one.frames for one in busy) >= SHARE_OF_IDLE * median(one.frames for one in quiet)


def windows(one: Opened) -> tuple[list[Window], list[Window]]:
    """100 workers and 1000 requests a second, after the same page with little to do, by turns."""
    quiet, busy = [], []
    for _ in range(2):
        for place in ("", "requests"):
            quiet.append(window(show(one, place, "?calm=1&rate=0")))
            busy.append(window(show(one, place, "?scale=100&rate=1000")))
    return quiet, busy


def window(page: Any) -> Window:
    protocol = page.context.new_cdp_session(page)
    protocol.send("Performance.enable")
    before = figures(protocol)
    counted = page.evaluate(
        """() => new Promise((done) => {
            let n = 0;
            const began = performance.now();
            const next = (now) => {
              n += 1;
              if (now - began > 2000) done(n * 1000 / (now - began)); else requestAnimationFrame(next);
            };
            requestAnimationFrame(next);
        })"""
    )
    after = figures(protocol)
    protocol.detach()
    worked, passed = (after[name] - before[name] for name in ("ThreadTime", "Timestamp"))
    return Window(float(counted), 1 - worked / passed)


def figures(protocol: Any) -> dict[str, float]:
    """Return what the browser counts; ThreadTime is the processor time of the page's main thread."""
    return {one["name"]: one["value"] for one in protocol.send("Performance.getMetrics")["metrics"]}
