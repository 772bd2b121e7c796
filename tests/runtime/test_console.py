"""The web console beside a `serve` with two workers of the fake engine: routes, guards, events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import pytest

from harness.processes import free_port
from harness.served import Serving, own_environment, served
from harness.waiting import until

FAKE = ("--engine", "fake", "--fake-engine", '{"vocab_size":2000,"token_ms":1}')


@dataclass
class Console:
    serving: Serving
    http: httpx.Client

    @property
    def origin(self) -> str:
        return str(self.http.base_url).rstrip("/")

    def get(self, path: str, **headers: str) -> Any:
        answer = self.http.get(path, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        ours = {"Origin": self.origin, "X-Console": "1"}
        return self.http.post(path, json=body, headers={**ours, **headers})

    def overview(self) -> dict[str, Any]:
        found: dict[str, Any] = self.get("/api/overview")
        return found

    def workers(self) -> list[dict[str, Any]]:
        return [one for one in self.overview()["workers"] if one["state"] == "ready"]


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder, port = tmp_path_factory.mktemp("console"), free_port()
    env = {**own_environment(folder), "DYN_VLLM_CONSOLE": "1"}
    url = f"http://127.0.0.1:{port}"
    with (
        served(folder, "--workers", "2", *FAKE, "--console-port", str(port), env=env) as running,
        httpx.Client(base_url=url, timeout=30) as client,
    ):
        until("the console's line", lambda: f"console: {url}/\n" in running.process.written())
        made = Console(running, client)
        until("both workers", lambda: len(made.workers()) == 2)
        yield made


def test_line_of_the_console_stands_under_the_ready_line(console: Console) -> None:
    """Directly under it, unless the workers were there before the console."""
    lines = console.serving.process.written().splitlines()
    ready = next(n for n, line in enumerate(lines) if line.startswith("ready: "))
    was_first = any(" console: ready " in line for line in lines[:ready])
    below = lines[ready + 1 :]
    assert f"console: {console.origin}/" in (below[:1] if was_first else below)


def test_settings_and_overview_are_those_of_the_deployment(console: Console) -> None:
    settings = console.get("/api/settings")
    assert settings["url"] == console.serving.url
    assert (settings["needs_login"], settings["run_folder"]) == (False, True)
    until("the model", lambda: console.get("/api/settings")["models"])
    assert console.get("/api/settings")["models"] == [
        {"name": "demo-chat", "kind": "chat", "adapter_of": None, "context": 4096}
    ]
    assert {"pause", "restart", "scale", "load_lora"} <= set(settings["actions"])
    found = console.overview()
    assert {one["name"] for one in found["processes"]} == {"frontend", "worker-1", "worker-2", "console"}
    assert {one["process"] for one in found["workers"]} == {"worker-1", "worker-2"}
    assert {(one["from"], one["kind"]) for one in found["edges"]} == {("frontend", "requests")}
    assert found["frontends"][0]["ready"] is True


def test_every_route_answers(console: Console) -> None:
    assert set(console.get("/api/history?seconds=600")["series"]["ttft_ms"]) == {"p50", "p90", "p99"}
    assert {"requests", "dropped"} <= set(console.get("/api/requests"))
    assert {"blocks", "workers", "tree"} <= set(console.get("/api/caches"))
    names = {one["name"] for one in console.get("/api/logs")["logs"]}
    assert {"frontend.log", "worker-1.log", "console.log"} <= names
    assert set(console.get("/api/logs/worker-1?limit=3")) == {"lines", "from_byte", "to_byte"}
    assert console.get("/api/bench")["state"] == "idle"
    assert console.http.get("/").headers["content-type"].startswith("text/html")
    assert console.http.get("/api/requests/unknown").status_code == 404


def test_models_answer_through_it_as_they_stream(console: Console) -> None:
    asked = {"model": "demo-chat", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    answer = console.post("/v1/chat/completions", {**asked, "max_tokens": 5})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.rstrip().endswith("data: [DONE]")
    assert console.get("/v1/models")["data"][0]["id"] == "demo-chat"


def test_pause_and_resume_are_what_the_commands_do(console: Console) -> None:
    worker = console.workers()[0]["id"]
    (paused,) = console.post("/api/actions/pause", {"worker": worker}).json()["results"]
    assert (paused["worker"], paused["ok"], paused["said"]) == (worker, True, "paused")
    said = f"worker {worker} is paused"
    until("the problem", lambda: said in {one["what"] for one in console.overview()["problems"]})
    (resumed,) = console.post("/api/actions/resume", {"worker": worker}).json()["results"]
    assert resumed["said"] == "resumed"
    until("it to be back", lambda: len(console.workers()) == 2)


def test_events_reach_an_open_page(console: Console) -> None:
    seen: set[str] = set()
    with console.http.stream("GET", "/api/live") as stream:
        for line in stream.iter_lines():
            seen |= {line.removeprefix("event: ")} if line.startswith("event: ") else set()
            if {"overview", "sample"} <= seen:
                break
    assert {"overview", "sample"} <= seen


def test_load_test_runs_and_is_counted(console: Console) -> None:
    asked = {"model": "demo-chat", "concurrency": "4", "input_tokens": 16, "output_tokens": 8}
    assert console.post("/api/bench", {**asked, "seconds": 600}).status_code == 200
    assert console.post("/api/bench", {**asked, "requests": 20}).status_code == 409
    console.post("/api/bench/stop", {})
    until("its stop", lambda: console.get("/api/bench")["state"] == "stopped")
    started = console.post("/api/bench", {**asked, "requests": 20})
    assert started.status_code == 200, started.text
    until("its end", lambda: console.get("/api/bench")["state"] != "running")
    found = console.get("/api/bench")
    assert (found["state"], found["id"]) == ("done", started.json()["id"]), found
    assert found["stages"][0]["requests"]["ok"] == 20
    until(
        "percentiles of its answers",
        lambda: any(value for value in console.get("/api/history")["series"]["ttft_ms"]["p50"]),
    )


def test_killed_console_comes_back_and_nothing_else_notices(console: Console) -> None:
    (before,) = [one for one in console.overview()["processes"] if one["kind"] == "console"]
    workers = {one["pid"] for one in console.workers()}
    psutil.Process(before["pid"]).kill()

    def is_back() -> bool:
        try:
            found = [one for one in console.overview()["processes"] if one["kind"] == "console"]
        except (httpx.HTTPError, AssertionError):
            return False
        return bool(found) and found[0]["pid"] != before["pid"]

    until("the console again", is_back)
    until("both workers", lambda: {one["pid"] for one in console.workers()} == workers)
    assert console.serving.process.poll() is None
