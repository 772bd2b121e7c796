"""The routes of the console, over ASGI."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from dynamo_vllm.console import app, passing, security, sessions
from harness.console_app import HOST, POSTED, Console, Decisions, streamed
from harness.refusals import refused
from harness.waiting import until_async


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console(tmp_path)


def shape_of_error(answer: httpx.Response) -> None:
    assert set(answer.json()["error"]) == {"message", "fix"}


async def test_every_answer_tells_the_browser_what_it_may_do(console: Console) -> None:
    paths = "/ /live /api/settings /api/history /api/nothing /assets/none.js /v1/other"
    answers = {path: await console.get(path) for path in paths.split()}
    answers["/api/overview"] = refusal = await console.get("/api/overview", host="evil.example")
    assert refusal.status_code == 421
    for path, answer in answers.items():
        assert answer.headers["content-security-policy"] == security.CSP, path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["cross-origin-resource-policy"] == "same-origin", path
        assert "server" not in answer.headers, path
        if path.startswith(("/api", "/v1")):
            assert answer.headers["cache-control"] == "no-store", path
        if answer.status_code >= 400:
            shape_of_error(answer)


async def test_settings_have_the_fields_of_the_contract(console: Console) -> None:
    found = (await console.get("/api/settings")).json()
    assert set(found) == {
        *("version", "read_only", "needs_login", "logged_in", "url", "namespace", "run_folder", "models"),
        *("login_with", "grafana", "actions", "prompt_text"),
    }
    assert "pause" in found["actions"] and found["logged_in"] is True


async def test_login_opens_and_logout_closes(tmp_path: Path) -> None:
    console = Console(tmp_path, token="secret-token")
    closed = (await console.get("/api/settings")).json()
    assert (closed["logged_in"], closed["url"], closed["models"], closed["actions"]) == (False, None, [], [])
    assert (await console.get("/api/history")).status_code == 401
    assert (await console.post("/v1/chat/completions", {})).status_code == 401
    assert (await console.post("/api/login", {"token": "wrong"})).status_code == 401
    answer = await console.post("/api/login", {"token": "secret-token"})
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith("console-8001=") and "HttpOnly" in cookie and "SameSite=strict" in cookie
    assert "secret-token" not in cookie and "Path=/;" in cookie and "Secure" not in cookie
    assert (await console.get("/api/history")).status_code == 200
    assert (await console.post("/api/logout")).json() == {"logged_in": False}
    assert (await console.get("/api/history")).status_code == 401


async def test_wrong_logins_from_one_address_do_not_keep_others_out(tmp_path: Path) -> None:
    console = Console(tmp_path, token="t")
    for _ in range(sessions.WRONG_TOKENS):
        assert (await console.post("/api/login", {"token": "wrong"})).status_code == 401
    assert (await console.post("/api/login", {"token": "t"})).status_code == 429
    elsewhere = httpx.ASGITransport(console.app, client=("10.0.0.7", 1234))
    async with httpx.AsyncClient(transport=elsewhere, base_url=f"http://{HOST}") as other:
        assert (await other.post("/api/login", json={"token": "t"}, headers=POSTED)).status_code == 200


async def test_cookie_is_for_the_path_and_the_scheme_that_browsers_see(tmp_path: Path) -> None:
    console = Console(tmp_path, token="t", prefix="/console/")
    https = {**POSTED, "origin": POSTED["origin"].replace("http:", "https:")}
    answer = await console.http.post("/api/login", json={"token": "t"}, headers=https)
    assert "Path=/console/;" in answer.headers["set-cookie"] and "Secure" in answer.headers["set-cookie"]
    cookie = answer.headers["set-cookie"].partition(";")[0]
    gone = await console.http.post("/api/logout", headers={**https, "cookie": cookie})
    assert "Path=/console/;" in gone.headers["set-cookie"] and "Max-Age=0" in gone.headers["set-cookie"]


async def test_bodies_that_are_something_else_or_long_are_refused(console: Console) -> None:
    for body in (b"{", b"[]", b'{"token": 1}', b"\xff", b"[" * 4000):
        answer = await console.http.post("/api/login", content=body, headers=POSTED)
        assert answer.status_code == 400, body[:9]
        shape_of_error(answer)
    answer = await console.http.post("/api/actions/pause", content=b" " * (65 << 10), headers=POSTED)
    assert answer.status_code == 413

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b" " * (1 << 20)

    answer = await console.http.post("/v1/embeddings", content=parts(), headers=POSTED)
    assert answer.status_code == 413 and console.upstream.seen == []


async def test_overview_waits_for_the_first_poll(console: Console) -> None:
    asking = asyncio.ensure_future(console.get("/api/overview"))
    await asyncio.sleep(0)
    await console.poller.poll()
    found = (await asking).json()
    assert set(found) == {"at", "processes", "frontends", "workers", "edges", "problems", "totals"}
    totals = {"requests_per_second", "tokens_per_second", "in_flight", "errors_per_second"}
    assert set(found["totals"]) == totals


async def test_queries_outside_their_range_are_refused(console: Console) -> None:
    for query in ("seconds=x", "seconds=1", "seconds=1e9", "ttft_ms=nan", "itl_ms=0"):
        assert (await console.get(f"/api/history?{query}")).status_code == 400, query


async def test_without_a_source_there_are_no_requests(console: Console) -> None:
    assert (await console.get("/api/requests")).json() == {"requests": [], "dropped": 0}
    assert (await console.get("/api/requests/x")).status_code == 404
    assert (await console.get("/api/caches")).json()["tree"] == {"nodes": [], "left_out": 0}


async def test_requests_are_those_of_their_source(tmp_path: Path) -> None:
    console = Console(tmp_path, decisions=Decisions())
    found = await console.get("/api/requests?limit=5&before=b&worker=&model=m")
    assert found.json()["requests"] == [[5, "b", None, "m"]]
    assert (await console.get("/api/requests/known")).json() == {"request": {"id": "known"}}
    assert (await console.get("/api/requests/other")).status_code == 404
    assert (await console.get("/api/caches")).json() == {"blocks": 7}
    assert (await console.get("/api/requests?limit=0")).status_code == 400


async def test_logs_are_listed_and_read(console: Console, tmp_path: Path) -> None:
    (tmp_path / "frontend.log").write_text("error: one\n")
    (only,) = (await console.get("/api/logs")).json()["logs"]
    assert (only["name"], only["bytes"]) == ("frontend.log", 11)
    page = (await console.get("/api/logs/frontend?after=0")).json()
    line = {"at_byte": 0, "text": "error: one", "level": "error"}
    assert page == {"lines": [line], "from_byte": 0, "to_byte": 11}
    assert (await console.get("/api/logs/..%2Fx")).status_code == 404


async def test_one_page_of_logs_is_read_at_a_time(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "worker-1.log").write_text("hello\n")
    reading, most = 0, 0

    async def read(do: Any, *args: Any) -> Any:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        for _ in range(10):
            await asyncio.sleep(0)  # the others have their turn
        reading -= 1
        return do(*args)

    monkeypatch.setattr(asyncio, "to_thread", read)
    answers = await asyncio.gather(*(console.get("/api/logs/worker-1?text=h") for _ in range(5)))
    assert [answer.status_code for answer in answers] == [200] * 5
    assert most == 1


async def test_read_only_refuses_what_changes_something_and_still_asks_models(tmp_path: Path) -> None:
    console = Console(tmp_path, read_only=True)
    for path in ("/api/actions/pause", "/api/bench", "/api/bench/stop"):
        assert (await console.post(path, {})).status_code == 403
    assert (await console.post("/v1/chat/completions", {})).status_code == 200
    assert (await console.get("/api/settings")).json()["actions"] == []


async def test_state_of_the_bench_has_the_fields_of_the_contract(console: Console) -> None:
    found = (await console.get("/api/bench")).json()
    assert set(found) == {"id", "state", "asked", "seconds", "progress", "stages", "error"}
    assert (await console.post("/api/bench", {"model": "m", "rate": 1})).status_code == 400


async def test_question_goes_to_the_deployment_without_our_cookie(console: Console) -> None:
    console.upstream.answer = streamed(200, b"data: 1\n\ndata: [DONE]\n\n", "text/event-stream")
    asked, sent = {"model": "m", "stream": True}, {"authorization": "Bearer k", "cookie": "console-8001=x"}
    answer = await console.post("/v1/chat/completions", asked, **sent)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.headers["content-type"] == "text/event-stream"
    (seen,) = console.upstream.seen
    assert (seen.url.path, json.loads(seen.content)) == ("/v1/chat/completions", asked)
    assert seen.headers["accept-encoding"] == "identity", "else a compressed answer could not be read"
    assert seen.headers["authorization"] == "Bearer k"
    assert not {"cookie", "x-console", "origin"} & set(seen.headers)


async def test_only_some_large_bodies_are_uploaded_at_once(console: Console) -> None:
    begun, go_on = 0, asyncio.Event()
    size = passing.SMALL_BYTES + 1

    async def body() -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        await go_on.wait()
        yield bytes(size)

    async def ask() -> int:
        headers = {**POSTED, "content-length": str(size)}
        return (await console.http.post("/v1/completions", content=body(), headers=headers)).status_code

    console.upstream.make = lambda: streamed(200, b"{}", "application/json")
    asked = [asyncio.ensure_future(ask()) for _ in range(20)]
    await until_async("some to begin", lambda: begun >= passing.MOST_UPLOADS)
    await console.get("/live")  # by now the others have come too
    assert begun == passing.MOST_UPLOADS
    assert (await console.post("/v1/completions", {})).status_code == 200, "a small one need not wait"
    go_on.set()
    assert await asyncio.gather(*asked) == [200] * 20


class Thinking(httpx.AsyncBaseTransport):
    """A deployment that takes for ever to answer."""

    def __init__(self) -> None:
        self.asked, self.stopped = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()
        raise AssertionError


async def test_request_that_the_user_stops_before_the_answer_is_stopped_at_the_deployment() -> None:
    deployment = Thinking()
    messages: list[Any] = [{"type": "http.request", "body": b"{}", "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await deployment.asked.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "headers": [], "path_params": {"path": "completions"}}
    client = httpx.AsyncClient(base_url="http://deployment", transport=deployment)
    async with asyncio.timeout(30):
        with refused(499, "the page has left"):
            await passing.passed_on(Request(scope, receive), client, asyncio.Semaphore())
    assert deployment.stopped.is_set()


async def test_error_of_the_deployment_is_passed_on_and_pages_of_it_never_run(console: Console) -> None:
    more = {"set-cookie": "a=b", "access-control-allow-origin": "*"}
    console.upstream.answer = streamed(503, b"<script>", "text/html", **more)
    answer = await console.get("/v1/models")
    assert (answer.status_code, answer.content) == (503, b"<script>")
    assert answer.headers["content-type"] == "application/octet-stream"
    assert "set-cookie" not in answer.headers and "access-control-allow-origin" not in answer.headers


async def test_other_paths_are_not_passed_on(console: Console) -> None:
    for request in ("GET chat/completions", "POST models", "POST ../engine/sleep", "POST files", "GET "):
        method, _, path = request.partition(" ")
        answer = await console.http.request(method, f"/v1/{path}", headers=POSTED)
        assert answer.status_code in (404, 405), request
    assert console.upstream.seen == []


async def test_deployment_that_does_not_answer_is_said(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any, **__: Any) -> None:
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(console.upstream.client, "send", fail)
    answer = await console.get("/v1/models")
    assert answer.status_code == 502 and "refused" in answer.json()["error"]["message"]


async def test_page_is_served_with_its_types(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"index.html": b"<html>", "app.js": b"x", "odd.exe": b"x"}
    monkeypatch.setattr(app, "read_assets", lambda: files)
    made = Console(Path("/nowhere"))
    assert (await made.get("/")).content == b"<html>"
    assert (await made.get("/assets/app.js")).headers["content-type"] == "text/javascript; charset=utf-8"
    assert (await made.get("/assets/odd.exe")).status_code == 404
    assert (await made.get("/assets/..%2Fapp.py")).status_code == 404
