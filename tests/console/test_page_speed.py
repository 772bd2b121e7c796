"""What the page of the web console computes and draws beside many workers and requests."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import pytest

from harness.browser import Opened, show

Open = Callable[..., Opened]
SHARE_OF_IDLE = 0.5


@pytest.mark.more
def test_many_workers_and_requests_leave_time(
    opened: Open, record_property: Callable[[str, object], None]
) -> None:
    """How much the page itself computes, in processor time, to which other programs add nothing."""
    quiet, busy = windows(opened())
    record_property("quiet and busy", (quiet, busy))
    assert median(busy) >= SHARE_OF_IDLE * median(quiet)


def windows(one: Opened) -> tuple[list[float], list[float]]:
    """100 workers and 1000 requests a second, after the same page with little to do, by turns."""
    quiet, busy = [], []
    for _ in range(2):
        for place in ("", "requests"):
            quiet.append(idle_share(show(one, place, "?calm=1&rate=0")))
            busy.append(idle_share(show(one, place, "?scale=100&rate=1000")))
    return quiet, busy


def idle_share(page: Any) -> float:
    """Return the part of two seconds in which the page's own thread was idle."""
    protocol = page.context.new_cdp_session(page)
    protocol.send("Performance.enable")
    before = figures(protocol)
    page.evaluate("() => new Promise((done) => setTimeout(done, 2000))")
    after = figures(protocol)
    protocol.detach()
    worked, passed = (after[name] - before[name] for name in ("ThreadTime", "Timestamp"))
    return float(1 - worked / passed)


def figures(protocol: Any) -> dict[str, float]:
    """Return what the browser counts; ThreadTime is the processor time of the page's main thread."""
    return {one["name"]: one["value"] for one in protocol.send("Performance.getMetrics")["metrics"]}
