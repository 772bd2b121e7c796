"""Every page of the web console in a real browser: errors, accessibility, names that try to be markup, the
keyboard and size.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.browser import (
    AXE,
    PAGES,
    ROOT,
    Opened,
    asked,
    choose,
    fill_area,
    open_request,
    open_tab,
    serious,
    show,
)

Open = Callable[..., Opened]
ASSETS = ROOT / "src" / "dynamo_vllm" / "console" / "assets"
BUNDLE_BYTES = 100 << 10
MARKUP = "<img src=x onerror=alert(1)>"
LATER = {"operate": ("Keys of the gateway", "Tenants of the gateway", "Usage by tenant")}
"""Tables that come after the first figures of a page."""


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_have_no_errors(opened: Open, scheme: str, width: int) -> None:
    one = opened(width, scheme)
    too_wide = {}
    for place, title in PAGES.items():
        page = whole(one, place)
        assert page.inner_text("h1") == title
        too_wide[title] = overhang(page)
    too_wide["request"] = overhang(open_request(one))
    assert {title: more for title, more in too_wide.items() if more > 0} == {}
    assert one.errors == []


def whole(one: Opened, place: str, served: str = "") -> Any:
    """Open a page and wait also for what it loads after its first figures."""
    page = show(one, place, served)
    for caption in LATER.get(place, ()):
        page.wait_for_selector(f"table:has(caption:text-is('{caption}'))")
    return page


def overhang(page: Any) -> int:
    """How many pixels the page is wider than the window."""
    found: int = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    return found


def test_long_names_fit_a_phone(opened: Open) -> None:
    one = opened(360)
    too_wide = {title: overhang(whole(one, place, "?hostile=1")) for place, title in PAGES.items()}
    page = show(one, "playground", "?hostile=1")
    long = page.locator("label:text-is('Model') + select option").last.evaluate("option => option.value")
    assert long.startswith(MARKUP) and len(long) > 150
    page.select_option("label:text-is('Model') + select", long)
    page.wait_for_selector(".hint:has-text('adapter of')")
    too_wide["model"] = overhang(page)
    too_wide["answer"] = overhang(asked(page, "Hello"))
    too_wide["request"] = overhang(open_request(one, "?hostile=1"))
    assert {title: more for title, more in too_wide.items() if more > 0} == {}
    assert one.errors == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(opened: Open, scheme: str) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed; npm ci in console/")
    one = opened(1280, scheme)
    source = AXE.read_text()
    found = {}
    for place, title in PAGES.items():
        found[title] = serious(whole(one, place), source)
    found["request"] = serious(open_request(one), source)
    found["worker"] = serious(worker_detail(one), source)
    found["question"] = serious(question(one, "Sleep"), source)
    found["answer"] = serious(asked(show(one, "playground"), "Hello", logprobs=True), source)
    found["login"] = serious(one.go("", "?login=1"), source)
    assert {title: findings for title, findings in found.items() if findings} == {}


def worker_detail(one: Opened) -> Any:
    page = show(one, "")
    page.click("tbody tr:nth-child(2) th a")
    page.wait_for_selector(".detail .facts")
    return page


def question(one: Opened, verb: str) -> Any:
    page = show(one, "operate")
    page.click(f".verbs button:text-is('{verb}')")
    page.wait_for_selector("dialog[open]")
    return page


@pytest.mark.parametrize("place", PAGES)
def test_markup_in_names_stays_text(opened: Open, place: str) -> None:
    one = opened()
    shown = "<script>alert(3)</script>" if place == "logs" else MARKUP
    page = whole(one, place, "?hostile=1")
    if place not in ("caches", "performance"):  # which have no names from outside
        page.wait_for_function("text => document.body.textContent.includes(text)", arg=shown)
    assert page.evaluate("document.querySelectorAll('img[onerror], #app script').length") == 0
    assert (one.dialogs, one.errors) == ([], [])


def test_markup_in_answers_stays_text(opened: Open) -> None:
    one = opened()
    page = asked(show(one, "playground"), "Say <b>this</b>")
    assert MARKUP in page.inner_text(".turn.model .text >> nth=-1")
    assert page.evaluate("document.querySelectorAll('.turn img, .turn b').length") == 0
    assert (one.dialogs, one.errors) == ([], [])


def test_navigation_by_keyboard(opened: Open) -> None:
    page = show(opened(), "")
    focused = "document.activeElement.textContent"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.tagName") == "H1"
    page.evaluate("document.activeElement.blur()")
    page.focus(".skip")
    for title in PAGES.values():
        page.keyboard.press("Tab")
        assert page.evaluate(focused).startswith(title)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.activeElement.tagName === 'H1'")
    assert page.evaluate(focused) == "Operate"
    assert page.title().startswith("Operate")


def test_question_keeps_and_returns_the_focus(opened: Open) -> None:
    page = question(opened(), "Pause")
    assert page.evaluate("document.activeElement.closest('dialog') !== null")
    assert "dynamo-vllm pause --drain-seconds 30 --all" in page.inner_text("dialog")
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    page.wait_for_function("() => document.activeElement.textContent === 'Pause'")


def test_action_says_what_it_did(opened: Open) -> None:
    one = opened()
    page = question(one, "Clear prefixes")
    page.click("dialog button.danger")
    page.wait_for_selector("dialog .results")
    assert "worker-1: clear_kv_blocks: done after 1.3 s" in page.inner_text("dialog")
    assert "refused (409" in page.inner_text("dialog .said.bad")
    page.click("dialog button:text-is('Close')")
    assert "clear_kv_blocks" in page.inner_text(".done")
    assert one.errors == []


def test_heat_map_by_keyboard(opened: Open) -> None:
    page = show(opened(), "caches")
    page.focus(".heat")
    before = page.inner_text("#heat-cell")
    page.keyboard.press("End")
    page.keyboard.press("ArrowRight")
    page.wait_for_function("text => document.querySelector('#heat-cell').innerText !== text", arg=before)
    assert page.evaluate("document.querySelector('.heat').scrollTop") > 0


@pytest.mark.parametrize("width", [360, 800, 1000, 1280, 1900])
@pytest.mark.parametrize("scale", [0, 12, 100])
def test_topology_has_no_text_over_text(opened: Open, scale: int, width: int) -> None:
    page = show(opened(width), "", f"?scale={scale}")
    overlaps = page.evaluate(
        """() => {
            const parts = [...document.querySelectorAll('.topology text:not(:has(tspan)), .topology tspan')];
            const texts = parts.filter((part) => part.textContent.trim() !== '');
            const boxes = texts.map((text) => [text.textContent, text.getBoundingClientRect()]);
            const near = 2;  // of a line's box, no letter stands there
            const meets = (a, b) => a.left < b.right - near && b.left < a.right - near
              && a.top < b.bottom - 2 * near && b.top < a.bottom - 2 * near;
            const edge = document.querySelector('.topology').getBoundingClientRect().right;
            const found = boxes.filter(([, box]) => box.right > edge + 1).map(([text]) => [text, 'the edge']);
            boxes.forEach(([text, box], i) => boxes.slice(i + 1).forEach(([other, more]) => {
              if (meets(box, more)) found.push([text, other]);
            }));
            return found;
        }"""
    )
    assert overlaps == []


def test_tools_thinking_and_two_models(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    page.click("summary:text-is('More')")
    page.click("text=Fill in an example")
    asked(page, "What is the weather?")
    assert json.loads(page.inner_text(".tool pre")) == {"city": "Berlin"}
    fill_area(page, "Result of weather", '{"sky": "blue"}')
    page.click("button:text-is('Send the result')")
    page.wait_for_selector("text=ended: stop")
    assert page.inner_text("details.thinking summary") == "Thinking"
    page.click("button:text-is('Clear')")
    fill_area(page, "Tools", "")
    choose(page, "Beside it", "sql")
    page.fill(".compose textarea", "Hello")
    page.click("button:text-is('Send')")
    page.wait_for_function("() => document.querySelectorAll('.talk .timing a').length === 2")
    page.click("button:text-is('Python')")
    assert "client.chat.completions.create(" in page.inner_text(".code pre")
    assert one.errors == []


@pytest.mark.parametrize(
    ("tab", "texts", "button", "shown"),
    [
        ("Completion", {"Prompt": "Once"}, "Complete", "text=ended: stop"),
        ("Embeddings", {"Texts": "one\ntwo"}, "Embed", "text=2 vectors of 64 numbers"),
        ("Rerank", {"Question": "which?", "Documents": "one\ntwo two"}, "Rank", "td:has-text('0.')"),
        ("Pictures", {"Description": "a square"}, "Draw", "img.picture"),
    ],
)
def test_other_kinds_of_models(
    opened: Open, tab: str, texts: dict[str, str], button: str, shown: str
) -> None:
    one = opened()
    page = show(one, "playground")
    open_tab(page, tab)
    for label, text in texts.items():
        fill_area(page, label, text)
    page.click(f"button:text-is('{button}')")
    page.wait_for_selector(shown)
    assert one.errors == []


def test_recording_is_written_down(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    open_tab(page, "Speech")
    recording = {"name": "a.wav", "mimeType": "audio/wav", "buffer": b"RIFF"}
    page.set_input_files("label:text-is('Recording') + input", recording)
    page.click("button:text-is('Write down')")
    page.wait_for_selector("text=A recording of")
    assert one.errors == []


def test_process_is_restarted_by_its_name(opened: Open) -> None:
    page = show(opened(), "operate")
    page.click("[aria-label='Restart frontend']")
    assert "dynamo-vllm restart frontend" in page.inner_text("dialog")
    page.click("dialog button.danger")
    page.wait_for_selector("text=ready again after")


def test_worker_is_drained_by_its_name_and_shown_so(opened: Open) -> None:
    page = show(opened(), "operate")
    page.click("[aria-label='Drain worker-2']")
    assert "dynamo-vllm drain worker-2" in page.inner_text("dialog")
    page.fill("dialog input", "5")
    assert "dynamo-vllm drain worker-2 --drain-seconds 5" in page.inner_text("dialog")
    page.click("dialog button.danger")
    page.wait_for_selector("text=drained and stopped after")
    page.click("dialog button.primary")
    page.wait_for_selector("tr:has([aria-label='Restart worker-2']) .state:text-is('drained')")
    assert page.query_selector("[aria-label='Drain worker-2']") is None
    assert page.query_selector("[aria-label='Drain frontend']") is None


def test_keys_and_limits(opened: Open) -> None:
    one = opened()
    page = show(one, "operate")
    page.click("button:text-is('Create a key')")
    page.fill("label:text-is('Name') + input", "bob")
    page.fill("label:text-is('Requests at a time') + input", "4")
    assert "dynamo-vllm keys create bob --concurrent 4" in page.inner_text("dialog")
    page.click("dialog button:text-is('Create')")
    page.wait_for_selector("text=dv-secret-shown-once")
    page.click("dialog button:text-is('Close')")
    page.wait_for_selector("th:text-is('bob')")
    assert "dv-secret-shown-once" not in page.content()
    page.click("[aria-label='Change the limits of research']")
    page.fill("label:text-is('Tokens per day') + input", "123456")
    page.click("dialog button:text-is('Set')")
    page.wait_for_selector("td:text-is('123,456')")
    assert one.errors == []


def test_bench_runs_to_a_table(opened: Open) -> None:
    one = opened()
    page = show(one, "bench")
    page.fill("label:text-is('Seconds') + input", "3")
    page.click("button:text-is('Start')")
    page.wait_for_selector("h2:text-is('Result')")
    assert page.inner_text("section:has(h2:text-is('Result')) tbody th") == "c=8"
    assert one.errors == []


def test_logs_filter_and_follow(opened: Open) -> None:
    page = show(opened(), "logs/worker-1")
    page.select_option("label:text-is('Level') + select", "error")
    page.wait_for_function(
        "() => { const lines = [...document.querySelectorAll('.log .line')];"
        " return lines.length > 0 && lines.every((line) => line.textContent.includes(' ERROR ')); }"
    )
    last = "document.querySelector('.log .line:last-child')?.innerText"
    page.wait_for_selector(".log .line.bad")
    before = page.evaluate(last)
    page.wait_for_function(f"text => {last} !== text", arg=before)
    page.fill("label:text-is('Text') + input", "no such line")
    page.wait_for_selector("text=No line fits.")


def test_login_is_asked_for(opened: Open) -> None:
    one = opened()
    page = one.go("", "?login=1")
    page.fill("input[type=password]", "wrong")
    page.click("button:text-is('Log in')")
    page.wait_for_selector("text=This is not the admin token.")
    page.fill("input[type=password]", "secret")
    page.click("button:text-is('Log in')")
    page.wait_for_selector(".topology svg")


def test_read_only_hides_what_changes_something(opened: Open) -> None:
    one = opened()
    page = one.go("operate", "?read_only=1")
    page.wait_for_selector("text=This console is read only")
    assert page.locator("main button").count() == 0
    page = one.go("bench", "?read_only=1")
    page.wait_for_selector("text=This console is read only")
    assert page.locator("button:text-is('Start')").count() == 0


def test_page_is_small_and_loads_nothing_from_elsewhere(
    opened: Open, record_property: Callable[[str, object], None]
) -> None:
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9, mtime=0)) for path in ASSETS.iterdir()}
    one = opened()
    page = show(one, "")
    assert [url for url in one.requests if not url.startswith((one.address, "data:", "about:"))] == []
    # Nothing but the three files and the settings is waited for before the page can be used.
    first = [Path(url).name for url in one.requests if url.startswith(one.address)][:4]
    assert sorted(name.split("#")[0] for name in first[1:]) == ["app.css", "app.js", "settings"]
    timing = page.evaluate("performance.getEntriesByType('navigation')[0].domInteractive")
    record_property("interactive after ms", timing)
    assert sum(sizes.values()) <= BUNDLE_BYTES, sizes
