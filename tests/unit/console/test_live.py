"""Events for open pages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from starlette.requests import ClientDisconnect

from dynamo_vllm.console import live
from dynamo_vllm.console.live import BEAT, Collector, Hub
from harness.refusals import refused

SCOPE = {"type": "http", "asgi": {"spec_version": "2.3"}}


def opened(hub: Hub, beat_seconds: float = 60.0) -> AsyncIterator[bytes]:
    return cast("AsyncIterator[bytes]", hub.response(beat_seconds=beat_seconds).body_iterator)


async def test_page_gets_what_is_kept_and_then_what_comes() -> None:
    hub = Hub()
    hub.publish("overview", {"at": 1}, keep=1)
    hub.publish("sample", {"at": 1})
    looked: list[bool] = []
    hub.on_watch = lambda: looked.append(hub.is_watched)
    page = opened(hub)
    assert await anext(page) == BEAT and looked == [True]
    assert await anext(page) == b'event: overview\ndata: {"at":1}\n\n'
    hub.publish("sample", {"text": "two\nlines"})
    assert await anext(page) == b'event: sample\ndata: {"text":"two\\nlines"}\n\n'


async def test_page_that_comes_later_gets_the_last_of_what_is_kept() -> None:
    hub = Hub()
    for number in range(5):
        hub.publish("action", number, keep=3)
    page = opened(hub)
    assert await anext(page) == BEAT
    assert [text[-1:] for text in (await anext(page)).split(b"\n\n")[:-1]] == [b"2", b"3", b"4"]


async def test_slow_page_misses_the_oldest_and_stops_nobody() -> None:
    hub = Hub()
    page = opened(hub)
    await anext(page)
    for number in range(live.MOST_WAITING + 5):
        hub.publish("sample", number)
    events = (await anext(page)).split(b"\n\n")[:-1]
    assert len(events) == live.MOST_WAITING and events[0].endswith(b"data: 5")


async def test_quiet_stream_shows_that_it_lives() -> None:
    page = opened(Hub(), 0.001)
    assert [await anext(page) for _ in range(3)] == [BEAT] * 3


async def test_closing_ends_all_and_their_places_are_free() -> None:
    hub = Hub()
    sent: list[Any] = []
    begun = asyncio.Event()

    async def stays() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)
        begun.set()

    pages = [asyncio.ensure_future(hub.response()(SCOPE, stays, send)) for _ in range(3)]
    await begun.wait()
    was_watched = hub.is_watched
    hub.close()
    await asyncio.gather(*pages)
    assert (was_watched, hub.is_watched) == (True, False)
    assert sum(not message.get("more_body", True) for message in sent) == 3, "each answer has its end"


async def test_stream_ends_with_the_login_of_its_page() -> None:
    hub, logged_in = Hub(), [True]
    page = cast("AsyncIterator[bytes]", hub.response(lambda: logged_in[0]).body_iterator)
    await anext(page)
    hub.publish("sample", 1)
    assert await anext(page) == b"event: sample\ndata: 1\n\n"
    logged_in[0] = False
    hub.publish("sample", 2)
    assert await anext(page, None) is None


async def test_pages_that_open_at_once_have_the_same_bound() -> None:
    hub = Hub()
    for _ in range(live.MOST_PAGES):
        hub.response()  # admitted; nothing of it is sent yet
    with refused(503):
        hub.response()


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
async def test_page_that_leaves_before_the_first_byte_gives_its_place_back(spec_version: str) -> None:
    hub = Hub()
    scope = {"type": "http", "asgi": {"spec_version": spec_version}}

    async def has_left() -> Any:
        return {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        raise OSError("the connection is closed")

    page = hub.response()
    was_watched = hub.is_watched
    with pytest.raises((ClientDisconnect, OSError)):
        await page(scope, has_left, send)
    assert (was_watched, hub.is_watched) == (True, False)


async def test_page_whose_task_is_cancelled_before_the_first_byte_gives_its_place_back() -> None:
    hub = Hub()
    sending = asyncio.Event()

    async def never(*_: Any) -> Any:
        sending.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(hub.response()(SCOPE, never, never))
    await sending.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not hub.is_watched


async def test_rows_that_come_together_are_sent_together_and_only_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live, "COLLECT_SECONDS", 0.0)
    hub = Hub()
    collector = Collector(hub, "request")
    page = opened(hub)
    await anext(page)
    made: list[int] = []

    def maker(number: int) -> Callable[[], int | None]:
        def make() -> int | None:
            made.append(number)
            return number if number % 2 else None

        return make

    last = 10 * live.MOST_COLLECTED
    for number in range(last):
        collector.add([maker(number)])
    events = (await anext(page)).split(b"\n\n")[:-1]
    assert made == list(range(last - live.MOST_COLLECTED, last))
    assert len(events) == sum(number % 2 for number in made)
    assert collector._seconds == live.COLLECT_MANY_SECONDS, "of so many, the next wait for each other longer"


async def test_nothing_is_made_while_nobody_looks() -> None:
    def unwanted() -> None:
        raise AssertionError("nobody looks")

    collector = Collector(Hub(), "request")
    collector.add([unwanted])
    await asyncio.sleep(0)
    assert not collector._waiting
