"""The page of the web console beside a real `serve` with fake engines: every page, every act, names that try
to be markup.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.models.tiny import make_tiny_model
from harness.adapters import make_adapter
from harness.browser import (
    AXE,
    FULL,
    PAGES,
    Opened,
    asked,
    choose,
    fill_area,
    open_tab,
    opening,
    serious,
    show,
)
from harness.console import RealConsole, console
from harness.waiting import until

pytestmark = pytest.mark.more

Open = Callable[..., Opened]
MARKUP = "<img/src=x/onerror=alert(1)>"
MODEL = f'"><script>alert(2)</script>{MARKUP}\u202eledom\u202c' + "m" * 40
"""The name of a model; the runtime's files cannot have names of 300 characters."""
REFUSED = ("<img src=x onerror=alert(3)>", '"><script>alert(4)</script>', "\u202eretpada\u202c", "a" * 300)
"""Names of adapters that no worker takes."""
ADAPTER = "onerror=alert(5)".translate(str.maketrans("=()", "-._")) + "/" + "a" * 180
TOKEN = "t0ken-of-this-test"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), model)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[RealConsole]:
    """Two workers of a model, and one of a model with a hostile name, with a few requests behind them."""
    spec = {"vocab_size": 900, "token_ms": 4, "adapters": 8}
    every = {"model": str(model), "engine": "fake", "lora_enabled": True}
    cached = json.dumps({**spec, "cached": [{"count": 40}]})
    groups = [
        {**every, "name": "fast", "count": 2, "served_model_name": "tiny", "fake_engine": cached},
        {**every, "name": "odd", "served_model_name": MODEL, "fake_engine": json.dumps(spec)},
    ]
    with console(tmp_path_factory.mktemp("serve"), groups=groups) as made:
        made.wait_for_workers(3)
        for number in range(6):
            made.ask("tiny", "one two three " * 40 + str(number % 2))
        made.ask(MODEL, "hello")
        until("their rows", lambda: len(made.get("api/requests")["requests"]) >= 7)
        until("both models", lambda: len(made.get("api/settings")["models"]) == 2)
        yield made


@pytest.fixture
def opened(browser: Any, real: RealConsole) -> Iterator[Open]:
    with opening(browser, real.url) as new:
        yield new


# --- every page ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_and_has_nothing_serious(
    opened: Open, real: RealConsole, scheme: str, width: int
) -> None:
    axe = AXE.read_text() if AXE.is_file() else None
    one = opened(width, scheme)
    found: dict[str, list[str]] = {}
    page = show(one, "")
    for place, title in {**PAGES, f"requests/{request_id(real)}": "request"}.items():
        page.evaluate("place => { location.hash = `#/${place}`; }", place)  # as a click in the menu
        page.wait_for_selector(f"h1:text-is('{PAGES[place.partition('/')[0]]}')")
        page.wait_for_selector(".timeline" if title == "request" else FULL[place])
        wider = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        found[title] = [f"{wider} px too wide"] if wider > 0 else []
        found[title] += one.errors + (serious(page, axe) if axe else [])
        one.errors.clear()
    assert {title: findings for title, findings in found.items() if findings} == {}
    if axe is None:
        pytest.skip("without axe-core; npm ci in console/")


def request_id(real: RealConsole) -> str:
    found: str = real.get("api/requests")["requests"][0]["id"]
    return found


def test_page_asks_only_its_own_server_and_no_more_than_it_must(opened: Open, real: RealConsole) -> None:
    one = opened()
    show(one, "")
    assert [url for url in one.requests if not url.startswith((real.url, "data:", "about:"))] == []
    policy = one.page.request.get(real.url).headers["content-security-policy"]
    assert "'unsafe" not in policy and "default-src 'none'" in policy


# --- asking models ---------------------------------------------------------------------------------------


def test_chat_streams_until_it_is_stopped(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    choose(page, "Model", "tiny")
    page.fill("label:text-is('Most tokens') + input", "3500")
    page.fill(".compose textarea", "one two three " * 20)
    page.click("button:text-is('Send')")
    page.wait_for_selector(".answer[aria-busy='true'] .text")  # some of the text, long before its end
    page.click("button:text-is('Stop')")
    page.wait_for_selector(".answer[aria-busy='false']:has-text('ended: stopped by you')")
    assert one.errors == []


def test_chat_ends_and_its_request_is_explained(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    choose(page, "Model", "tiny")
    asked(page, "one two three " * 20)
    assert "ended: length" in page.inner_text(".timing")
    assert "gaps" in page.inner_text(".timing") and "256 tokens" in page.inner_text(".timing")
    page.click(".timing a")
    page.wait_for_selector("h2:text-is('Choice of the worker')")
    page.wait_for_selector("tbody th:has-text('worker-2')")  # names come with the overview
    names = page.locator("tbody th").all_inner_texts()
    assert sorted(name.split()[0] for name in names) == ["worker-1", "worker-2"]
    assert page.locator("tbody th:has-text('chosen')").count() == 1
    assert page.locator(".timeline").inner_text().startswith("received")
    # The page may come before the frontend's record; it then waits for it.
    assert [error for error in one.errors if "404" not in error] == []


def test_two_models_answer_side_by_side(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    choose(page, "Model", "tiny")
    choose(page, "Beside it", MODEL)
    assert page.locator(".talk h3").all_text_contents() == ["tiny", MODEL]
    page.fill(".compose textarea", "hello")
    page.click("button:text-is('Send')")
    page.wait_for_function("() => document.querySelectorAll('.talk .timing a').length === 2")
    assert (one.dialogs, one.errors) == ([], [])


def test_completion_ends(opened: Open) -> None:
    one = opened()
    page = show(one, "playground")
    open_tab(page, "Completion")
    choose(page, "Model", "tiny")
    fill_area(page, "Prompt", "one two")
    page.click("button:text-is('Complete')")
    page.wait_for_selector("text=ended: length")
    assert one.errors == []


def test_load_test_is_drawn_while_it_runs(opened: Open) -> None:
    one = opened()
    page = show(one, "bench")
    choose(page, "Model", "tiny")
    page.fill("label:text-is('Answer tokens') + input", "16")
    run = "section:has(h2:text-is('Run'))"
    page.fill("label:text-is('Seconds') + input", "120")
    page.click("button:text-is('Start')")
    page.wait_for_selector(f"{run}:has(.state:text-is('running')) .chart canvas")
    page.click("button:text-is('Stop')")
    page.wait_for_selector(f"{run} .state:text-is('stopped')")
    page.fill("label:text-is('Seconds') + input", "4")
    page.click("button:text-is('Start')")
    page.wait_for_selector(f"{run} .state:text-is('done')")
    page.wait_for_selector("h2:text-is('Result')")
    cells = page.locator("section:has(h2:text-is('Result')) tbody td").all_inner_texts()
    assert int(cells[0].replace(",", "")) > 0 and cells[1] == "0", cells
    assert one.errors == []


# --- looking ---------------------------------------------------------------------------------------------


def test_overview_follows_the_load(opened: Open, real: RealConsole) -> None:
    one = opened()
    page = show(one, "")
    stat = "dl.stats div:has(dt:text-is('Requests')) dd"
    assert page.locator("tbody th").all_inner_texts() == ["worker-1", "worker-2", "worker-3"]

    def is_shown() -> bool:
        real.ask("tiny", "hello")
        return page.inner_text(stat).split()[0] not in ("0", "–")

    until("the rate of requests", is_shown)
    assert one.errors == []


def test_logs_are_filtered(opened: Open) -> None:
    one = opened()
    page = show(one, "logs/worker-1")
    page.fill("label:text-is('Text') + input", "registering")
    page.wait_for_function(
        "() => { const lines = [...document.querySelectorAll('.log .line')];"
        " return lines.length > 0 && lines.every((line) => line.innerText.includes('registering')); }"
    )
    page.fill("label:text-is('Text') + input", "no such line")
    page.wait_for_selector("text=No line fits.")
    page = show(one, "logs/worker-1")
    choose(page, "Level", "error")
    page.wait_for_function(
        "() => { const lines = [...document.querySelectorAll('.log .line')];"
        " if (lines.length === 0) return document.body.innerText.includes('No line fits.');"
        " return lines.every((line) => !line.textContent.includes('INFO')); }"
    )
    assert one.errors == []


# --- acting ----------------------------------------------------------------------------------------------


def act(page: Any, button: str | None) -> str:
    """Press a button, if the question is not yet open, answer it, and return what was done."""
    if button is not None:
        page.click(button)
    page.click("dialog[open] button[type=submit]")
    page.wait_for_selector("dialog .results, dialog .notice.bad")
    said = str(page.inner_text("dialog"))
    page.click("dialog button:text-is('Close')")
    page.wait_for_selector("dialog", state="detached")
    return said


def wait_for_done(page: Any, verbs: list[str]) -> None:
    """Wait until these were done last, the newest first; below is what other pages have done before."""
    page.wait_for_function(
        "verbs => [...document.querySelectorAll('.done > li > strong')].map((one) => one.textContent)"
        ".slice(0, verbs.length).join() === verbs.join()",
        arg=verbs,
    )


def verb(title: str) -> str:
    return f".verbs button:text-is('{title}')"


def load_adapter(page: Any, name: str, source: Path) -> str:
    page.click("button:text-is('Load an adapter')")
    page.fill("label:text-is('Name') + input", name)
    page.fill("label:text-is('Source') + input", str(source))
    return act(page, None)


def test_names_that_try_to_be_markup_stay_text(opened: Open, real: RealConsole, adapter: Path) -> None:
    """Also the names of adapters that workers refuse, in what they say of them."""
    one = opened()
    page = show(one, "operate")
    for name in REFUSED:
        said = load_adapter(page, name, adapter)
        assert said.count("is not a valid name of an adapter") == 3, said
    wait_for_done(page, ["load_lora"] * len(REFUSED))
    assert all(name in page.inner_text(".done") for name in REFUSED[:2])
    assert page.evaluate(MADE_OF_NAMES) == 0
    for place in PAGES:
        page = show(one, place)
        if place in NAMED:
            page.wait_for_function("text => document.body.textContent.includes(text)", arg=MODEL)
        assert page.evaluate(MADE_OF_NAMES) == 0
    assert (one.dialogs, one.errors) == ([], [])


NAMED = ("", "playground", "requests", "bench")
"""The pages that show names of models."""
MADE_OF_NAMES = "document.querySelectorAll('img[onerror], #app script').length"


def test_adapter_is_loaded_used_and_unloaded(opened: Open, real: RealConsole, adapter: Path) -> None:
    one = opened(360)
    page = show(one, "operate")
    assert load_adapter(page, ADAPTER, adapter).count(": loaded") == 3
    row = f"section:has(h2:text-is('Adapters')) tr:has(th:text-is('{ADAPTER}'))"
    page.wait_for_selector(f"{row} .state:text-is('loaded')")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    until("its model", lambda: ADAPTER in {one["name"] for one in real.get("api/settings")["models"]})
    page = show(one, "playground")
    choose(page, "Model", ADAPTER)
    asked(page, "hello")
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    page = show(one, "operate")
    assert act(page, f"{row} button").count(": unloaded") == 3
    page.wait_for_selector("text=No adapter is loaded.")
    assert one.errors == []


def test_worker_sleeps_and_wakes(opened: Open, real: RealConsole) -> None:
    one = opened()
    page = show(one, "operate")
    (worker,) = [each["id"] for each in real.workers() if each["process"] == "worker-1"]
    choose(page, "Act on", worker)
    assert "worker-1: asleep after" in act(page, verb("Sleep"))
    page.wait_for_selector(".bar-of .state:text-is('asleep')")
    assert "worker-1: awake after" in act(page, verb("Wake"))
    page.wait_for_selector(".bar-of .state:text-is('ready')")
    assert "worker-1: paused" in act(page, verb("Pause"))
    page.wait_for_selector(".bar-of .state:text-is('paused')")
    assert "worker-1: resumed" in act(page, verb("Resume"))
    page.wait_for_selector(".bar-of .state:text-is('ready')")
    wait_for_done(page, ["resume", "pause", "wake_up", "sleep"])
    assert one.errors == []


def test_caches_are_cleared_on_all_workers(opened: Open) -> None:
    one = opened()
    page = show(one, "operate")
    assert act(page, verb("Clear prefixes")).count(": KV blocks cleared") == 3
    assert act(page, verb("Reset caches")).count(": caches cleared") == 3
    wait_for_done(page, ["reset_caches", "clear_kv_blocks"])
    assert one.errors == []


def test_what_a_worker_refuses_is_said(opened: Open) -> None:
    one = opened()
    page = show(one, "operate")
    assert "this worker has no tiers of KV caches" in act(page, verb("Prove tiers"))
    assert one.errors == []


def test_process_is_restarted_drained_and_its_group_scaled(opened: Open, real: RealConsole) -> None:
    one = opened()
    page = show(one, "operate")
    row = "section:has(h2:text-is('Processes')) tr:has(a:text-is('worker-2'))"
    assert "worker-2: ready after" in act(page, "[aria-label='Restart worker-2']")
    until("its count", lambda: page.inner_text(f"{row} td[data-label=Restarts]") == "1")
    assert "worker-2" in act(page, "[aria-label='Drain worker-2']")
    page.wait_for_selector(f"{row} .state:text-is('drained')")
    assert "worker-2: ready after" in act(page, "[aria-label='Restart worker-2']")
    page.click("[aria-label='Scale fast']")
    page.fill("label:text-is('Workers') + input", "3")
    assert "fast: 3 workers (worker-4 started)" in act(page, None)
    page.wait_for_selector("a:text-is('worker-4')")
    real.wait_for_workers(4)
    page.click("[aria-label='Scale fast']")
    page.fill("label:text-is('Workers') + input", "2")
    assert "fast: 2 workers (worker-4 " in act(page, None)
    page.wait_for_selector("a:text-is('worker-4')", state="detached")
    real.wait_for_workers(3)
    assert one.errors == []


# --- other consoles of the same deployment ---------------------------------------------------------------


def test_read_only_console_only_shows(browser: Any, real: RealConsole, tmp_path: Path) -> None:
    with real.another(tmp_path, "--console-read-only") as url, opening(browser, url) as new:
        one = new()
        page = one.go("operate")
        page.wait_for_selector("text=This console is read only")
        assert page.locator("main button").count() == 0
        page = one.go("bench")
        page.wait_for_selector("text=This console is read only")
        assert page.locator("button:text-is('Start')").count() == 0
        page = show(one, "playground")
        choose(page, "Model", "tiny")
        asked(page, "hello")
        assert one.errors == []


def test_login_with_the_admin_token(browser: Any, real: RealConsole, tmp_path: Path) -> None:
    with real.another(tmp_path, "--admin-token", TOKEN) as url, opening(browser, url) as new:
        one = new()
        page = one.go("")
        page.fill("input[type=password]", "wrong")
        page.click("button:text-is('Log in')")
        page.wait_for_selector("[role=alert], .notice.bad, .said.bad")
        assert one.errors.pop().endswith("401 (Unauthorized)")
        if AXE.is_file():
            assert serious(page, AXE.read_text()) == []
        page.fill("input[type=password]", TOKEN)
        page.click("button:text-is('Log in')")
        page.wait_for_selector(".topology svg")
        assert TOKEN not in page.content()
        page.click("button:text-is('Log out')")
        page.wait_for_selector("input[type=password]")
        assert page.request.get(f"{url}api/overview").status == 401
        assert one.errors == []
