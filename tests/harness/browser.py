"""A page in a browser, and a record of what went wrong on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parent.parent.parent
WAIT_MS = 60_000
AXE = ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js"
PAGES = {
    "": "Overview",
    "playground": "Playground",
    "requests": "Why there?",
    "caches": "Caches",
    "performance": "Performance",
    "bench": "Bench",
    "logs": "Logs",
    "operate": "Operate",
}
FULL = {
    "": ".topology svg",
    "playground": "textarea",
    "requests": "tbody tr",
    "caches": ".heat canvas[style]",
    "performance": ".chart canvas",
    "bench": "form button",
    "logs": ".log .line",
    "operate": ".verbs button",
}
"""What is there once a page has its figures."""
LIVE = ".where .state:text-is('live')"


@dataclass
class Opened:
    """A page, and what went wrong on it."""

    page: Any
    address: str
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    @classmethod
    def watch(cls, page: Any, address: str) -> Self:
        """Take a new page and note errors, requests and dialogs of all that it will show."""
        one = cls(page, address)
        page.set_default_timeout(WAIT_MS)
        page.on("console", one._note_line)
        page.on("pageerror", lambda error: one.errors.append(str(error)))
        page.on("request", lambda request: one.requests.append(request.url))
        page.on("dialog", one._dismiss)
        return one

    def go(self, place: str = "", served: str = "") -> Any:
        """Open a page anew: the part of the address after #, and what the stand-in is to serve."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.address}{served}#/{place}")
        self.page.wait_for_selector("h1")
        return self.page

    def _note_line(self, said: Any) -> None:
        if said.type == "error":
            self.errors.append(said.text)

    def _dismiss(self, dialog: Any) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()


@contextlib.contextmanager
def opening(browser: Any, address: str) -> Iterator[Callable[..., Opened]]:
    """Open pages of one server; they are closed at the end."""
    contexts = []

    def new(width: int = 1280, scheme: str = "light", height: int = 900, **more: Any) -> Opened:
        size = {"width": width, "height": height}
        context = browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce", **more)
        contexts.append(context)
        return Opened.watch(context.new_page(), address)

    yield new
    for context in contexts:
        context.close()


def show(opened: Opened, place: str, served: str = "") -> Any:
    """Open a page and wait until it has its figures and hears what is new."""
    page = opened.go(place, served)
    page.wait_for_selector(LIVE, state="attached")
    name, _, rest = place.partition("?")[0].partition("/")
    page.wait_for_selector(".timeline" if name == "requests" and rest else FULL[name])
    return page


def redrawn(page: Any) -> None:
    """Wait until what was changed before is drawn, which the page does in its next frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def choose(page: Any, label: str, value: str) -> None:
    """Choose from a list; what is done after it finds the page as the choice has made it."""
    page.select_option(f"label:text-is('{label}') + select", value)
    redrawn(page)


def open_tab(page: Any, title: str) -> None:
    """Open a tab of the playground and wait for its fields: until then, those of the one before are there."""
    page.click(f".segments button:text-is('{title}')")
    page.wait_for_selector(f".segments button[aria-pressed=true]:text-is('{title}')")


def fill_area(page: Any, label: str, text: str) -> None:
    page.fill(f"label:text-is('{label}') + textarea", text)


def open_request(opened: Opened, served: str = "") -> Any:
    """Open the first request of the list."""
    page = show(opened, "requests", served)
    page.click("label:has-text('Follow')")  # else the list moves on
    page.click("tbody tr:first-child th a")
    page.wait_for_selector(".timeline")
    return page


def serious(page: Any, axe: str) -> list[str]:
    if not page.evaluate("'axe' in window"):
        page.evaluate(axe + ";0")
    result = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{one['id']}: {one['nodes'][0]['html'][:160]}"
        for one in result["violations"]
        if one["impact"] in ("serious", "critical")
    ]


def asked(page: Any, text: str, *, logprobs: bool = False) -> Any:
    """Send the first message and wait for the whole answer."""
    if logprobs:
        page.check("text=Log-probabilities")
    page.fill(".compose textarea", text)
    page.click("button:text-is('Send')")
    page.wait_for_selector(".answer[aria-busy='false']:has-text('ended:')")  # its counts come after its end
    return page
