"""Tests that schemas which take too long to compile are refused over HTTP, while others are served."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from cpu.completions import PATH, body
from cpu.stacks import Start
from cpu.streams import Load
from harness.misbehaving import some_of
from harness.processes import command_line, survivors
from harness.stack import Stack
from harness.waiting import until
from harness.warm import WARMED

SECONDS = "4"
"""Is long enough for others to be served meanwhile."""


@pytest.fixture(scope="module")
def guarded(start_module: Start) -> Stack:
    return start_module("--guide-seconds", SECONDS, env=WARMED)


def ask(made: Stack, schema: dict[str, Any]) -> httpx.Response:
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    return httpx.post(f"{made.url}/v1/chat/completions", json=chat, timeout=100)


def checkers(made: Stack) -> list[psutil.Process]:
    below = psutil.Process(made.workers[0].pid).children(recursive=True)
    return [process for process in below if "checker" in " ".join(command_line(process))]


def test_hostile_schema_is_refused_while_others_are_served(guarded: Stack) -> None:
    worker = psutil.Process(guarded.workers[0].pid)
    before = worker.memory_info().rss
    with Load(guarded, clients=2) as load, ThreadPoolExecutor() as pool:
        load.settled()
        streamed, asked = len(load.texts), pool.submit(ask, guarded, some_of(400))
        honest = honest_answers_until(guarded, asked)
        answer = asked.result()
        assert answer.status_code == 400, answer.text
        assert f"takes more than {SECONDS} s to compile" in answer.json()["message"]
        load.settled()
    assert honest and set(honest) == {200}, "and before it: a worker that stands still answers nobody"
    assert not load.failures and len(load.texts) > streamed
    assert worker.memory_info().rss - before < 300 << 20, "the worker makes no grammar of it itself"


def honest_answers_until(made: Stack, asked: Future[httpx.Response]) -> list[int]:
    """Asks with small schemas, all different, until the hostile one is answered."""
    found: list[int] = []
    while not asked.done():
        answer = ask(made, {"type": "object", "properties": {f"q{len(found)}": {"type": "integer"}}})
        if not asked.done():
            found.append(answer.status_code)
    return found


def test_refused_schema_is_refused_at_once_the_next_time(guarded: Stack) -> None:
    assert ask(guarded, some_of(6000)).status_code == 400
    known = {process.pid for process in checkers(guarded)}
    assert ask(guarded, some_of(6000)).status_code == 400
    assert {process.pid for process in checkers(guarded)} <= known, "nobody had to check it"


def test_client_that_leaves_ends_the_checking(start: Start) -> None:
    """The check would otherwise continue for minutes."""
    made = start("--guide-seconds", "600")
    assert ask(made, {"type": "object"}).status_code == 200
    (quick,) = checkers(made)
    asked = body("a", 4, guided_json=some_of(300), stream=True)
    with httpx.Client() as client, ThreadPoolExecutor() as pool:
        leaving = pool.submit(client.post, made.url + PATH, json=asked, timeout=100)
        (slow,) = until("the slow lane", lambda: [p for p in checkers(made) if p != quick], 60)
        client.close()
        with pytest.raises((httpx.HTTPError, OSError)):
            leaving.result(60)
    assert survivors([slow], 60) == []
    assert ask(made, {"type": "object", "properties": {"a": {"type": "boolean"}}}).status_code == 200


def test_killed_checkers_are_replaced(guarded: Stack) -> None:
    ask(guarded, {"type": "object", "properties": {"b": {"type": "boolean"}}})
    killed = checkers(guarded)
    for process in killed:
        process.kill()
    assert killed and survivors(killed) == []
    assert ask(guarded, {"type": "object", "properties": {"c": {"type": "boolean"}}}).status_code == 200


NESTED = "((((a{1,9}){1,9}){1,9}){1,9}){60}"
"""Compiles at once, but finding the allowed tokens takes a second after 35 tokens."""


@pytest.mark.parametrize(
    ("regex", "message"),
    [
        (NESTED, "guided_regex: takes the engine more than 0.1 s for each token"),
        (f"([b-f]{{1,3}}g){{90}}{NESTED}", "guided_regex: takes the engine too long for each token"),
    ],
    ids=["from the beginning", "later than the checker looks"],
)
def test_regex_that_is_slow_to_follow_is_refused_and_streams_go_on(
    guarded: Stack, regex: str, message: str
) -> None:
    with Load(guarded, clients=2) as load:
        load.settled()
        answer = guarded.post(PATH, body("a", 600, guided_regex=regex))
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["message"]
        load.settled()
    assert not load.failures
