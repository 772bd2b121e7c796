"""A page of the console in Chromium: which frames it draws, what it holds in memory."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from typing import Any, NamedTuple

COUNT = """() => {
  const told = window.drawn = {frames: 0, worst: 0, last: performance.now()};
  const next = (now) => {
    told.frames += 1; told.worst = Math.max(told.worst, now - told.last); told.last = now;
    requestAnimationFrame(next);
  };
  requestAnimationFrame(next);
}"""
LOOK = """() => {
  const {frames, worst} = window.drawn;
  window.drawn.frames = 0; window.drawn.worst = 0;
  return [frames, worst, performance.memory.usedJSHeapSize];
}"""


class Drawn(NamedTuple):
    """Since the last look."""

    frames: int
    worst_ms: float
    """The longest time between two frames."""
    heap_bytes: int


class Page:
    def __init__(self, page: Any, url: str) -> None:
        self._page, self._url = page, url
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def show(self, place: str, selector: str) -> None:
        if self._page.url.startswith(self._url):
            self._page.goto(f"{self._url}#/{place}")  # as a click there: the page is not loaded anew
        else:
            self._page.goto(f"{self._url}#/{place}")
            self._page.evaluate(COUNT)
        self._page.wait_for_selector(selector)
        self.look()

    def look(self) -> Drawn:
        frames, worst, heap = self._page.evaluate(LOOK)
        return Drawn(int(frames), float(worst), int(heap))


@contextlib.contextmanager
def opened(url: str) -> Iterator[Page]:
    from playwright import sync_api

    path = os.environ.get("DYNAMO_VLLM_CHROMIUM") or shutil.which("chromium")
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--enable-precise-memory-info"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(60_000)
        yield Page(page, url)
        browser.close()
