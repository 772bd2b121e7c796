"""A real Prometheus over a real deployment: what rules and dashboard ask for is there, and alerts fire."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import dashboard
import httpx
import pytest
import yaml

from harness.prometheus import Prometheus, Selected, labels_named, prometheus, selected, tool
from harness.stack import Stack, stack
from harness.waiting import NotInTime, until
from runtime.conftest import fake

pytestmark = pytest.mark.more

FOLDER = Path(__file__).parents[2] / "deploy" / "observability" / "prometheus"
STALLS, FAILS, GOES_ON = 600, 601, 300
"""First tokens of prompts: one that the engine never answers, one that it fails on, and any other."""
WAITING = 12
NOT_HERE = ("vllm:", "dynamo_component_kv_tier_bytes")
"""Series of vLLM (tests/contract) and of tiers (tests/cpu/test_tier_routing.py)."""


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """Everything that is asked of Prometheus, by where it stands."""
    found = {rule.get("alert") or rule["record"]: str(rule["expr"]) for rule in rules()}
    for number, (title, expression) in enumerate(dashboard.expressions()):
        found[f"{title} ({number})"] = plain(expression)
    return found


def plain(expression: str) -> str:
    """As Grafana sends it."""
    text = expression.replace("$__rate_interval", "1m")
    return re.sub(r"\$(model|process)\b", ".*", text)


def configuration(folder: Path, targets: list[dict[str, Any]]) -> Path:
    """The shipped one, twice a second; alerts wait half a second, not minutes."""
    run, mine = folder / "run", folder / "prometheus"
    run.mkdir()
    mine.mkdir()
    (run / "prometheus.json").write_text(json.dumps(targets))
    config = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())
    config["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval", "scrape_timeout"), "500ms")
    (mine / "prometheus.yaml").write_text(yaml.safe_dump(config))
    text = (FOLDER / "rules.yaml").read_text()
    (mine / "rules.yaml").write_text(re.sub(r"\bfor: \w+", "for: 500ms", text))
    return mine / "prometheus.yaml"


def targets(deployment: Stack) -> list[dict[str, Any]]:
    """As `serve` writes them."""
    found = [("dynamo-vllm-frontend", "frontend", deployment.port)]
    found += [("dynamo-vllm-worker", f"worker-{n}", w.system_port) for n, w in enumerate(deployment.workers)]
    return [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"job": job, "process": name, "__scheme__": "http"}}
        for job, name, port in found
    ]


class Watched:
    """Two workers behind a frontend, and a Prometheus that watches them."""

    def __init__(self, deployment: Stack, server: Prometheus, start: list[str]) -> None:
        self.deployment, self.server, self._start = deployment, server, start

    def ask(self, **more: Any) -> httpx.Response:
        return self.deployment.post("/v1/completions", {"model": "tiny", "prompt": [GOES_ON] * 40} | more)

    def at_work(self) -> list[int]:
        """The numbers of the workers that have a request."""
        running = [w.metric("dynamo_component_requests_running") for w in self.deployment.workers]
        return [number for number, count in enumerate(running) if count]

    def kill(self, number: int) -> None:
        self.deployment.workers[number].signal(signal.SIGKILL)

    def replace(self, number: int) -> None:
        """Start a killed worker again on its port, as a supervisor does."""
        worker = self.deployment.workers[number]
        worker.process.wait(60)
        port = ["worker", "--system-port", str(worker.system_port), *self._start]
        worker.process = self.deployment._start(f"worker{number}-again", port)

    def until_firing(self, *alerts: str) -> None:
        until(f"{alerts} to fire", lambda: set(alerts) <= self.server.firing(), every=0.1)

    def until_silent(self, *alerts: str) -> None:
        until(f"{alerts} to end", lambda: not set(alerts) & self.server.firing(), every=0.1)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """So many requests that get no token for as long as this is open."""
        body = {"model": "tiny", "prompt": [STALLS], "max_tokens": 4, "stream": True}
        limits = httpx.Limits(max_connections=WAITING)
        with httpx.Client(timeout=60, limits=limits) as client:

            def one() -> None:
                with suppress(httpx.HTTPError, RuntimeError):  # closed under it
                    client.post(f"{self.deployment.url}/v1/completions", json=body)

            threads = [threading.Thread(target=one) for _ in range(WAITING)]
            for thread in threads:
                thread.start()
            yield
        for thread in threads:
            thread.join(30)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Watched]:
    tool("prometheus")
    folder = tmp_path_factory.mktemp("watched")
    spec: dict[str, Any] = {"token_ms": 10, "max_num_seqs": WAITING // 2, "adapters": 2}
    words = list(fake(model, **spec, stall_on_token=STALLS, fail_on_token=FAILS))
    with stack(folder) as deployment:
        deployment.start_frontend()
        for _ in range(2):
            deployment.start_worker(*words)
        deployment.wait_ready()
        with prometheus(folder, configuration(folder, targets(deployment))) as server:
            yield Watched(deployment, server, words)


Killed = tuple[int, httpx.Response]
"""The number of a worker, and the answer that was on its way."""


@pytest.fixture(scope="module")
def killed(watched: Watched) -> Killed:
    """A worker with an answer on its way, which moves; until its alert fires, and ends with a successor."""
    until("a first scrape", lambda: len(watched.server.query("up == 1")) == 3)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(watched.ask, max_tokens=600, ignore_eos=True)
        number = until("one at work", watched.at_work)[0]
        watched.kill(number)
        fires = f'ALERTS{{alertname="DynamoVllmWorkerDown", alertstate="firing", process="worker-{number}"}}'
        until("the alert to fire", lambda: watched.server.query(fires), every=0.1)
        watched.replace(number)
        watched.until_silent("DynamoVllmWorkerDown")
        return number, answer.result(60)


def test_killed_worker_fires_and_its_successor_ends_it(watched: Watched, killed: Killed) -> None:
    assert killed[1].status_code == 200
    moves = "sum(dynamo_frontend_model_migration_total) >= 1"
    until("a move to be counted", lambda: watched.server.query(moves))


def test_queue_that_grows_fires_and_ends_when_it_is_gone(watched: Watched) -> None:
    """The fake engine's cache is full by then too."""
    both = ("DynamoVllmQueueGrowing", "DynamoVllmKvCacheFull")
    with watched.waiting():
        watched.until_firing(*both)
    watched.until_silent(*both)


def test_every_series_and_label_that_is_asked_for_is_there(watched: Watched, killed: Killed) -> None:
    """Others know of series that no worker of this deployment has."""
    assert watched.ask(max_tokens=2).status_code == 200
    assert watched.ask(prompt=[FAILS]).status_code == 500
    until("the newest figure", lambda: watched.server.query("dynamo_vllm:errors:ratio1h"))
    assert_soon_none("missing", lambda: missing(watched.server.series()))


def assert_soon_none(what: str, found: Callable[[], list[Any]]) -> None:
    """A series comes with a scrape, its rate with the next, and both go while their process is late."""
    left: list[Any] = []

    def is_empty() -> bool:
        left[:] = found()
        return not left

    with suppress(NotInTime):
        until(f"nothing {what}", is_empty, every=0.1)
    assert not left, what


def missing(known: Mapping[str, Sequence[Mapping[str, str]]]) -> list[tuple[str, object]]:
    """The series and labels of all expressions that are not there."""
    found: list[tuple[str, object]] = []
    for where, expression in expressions().items():
        parts = selected(expression)
        asked = [part for part in parts if not part.name.startswith(NOT_HERE)]
        found += [(where, part) for part in asked if not is_there(part, known)]
        if asked == parts:
            labels = {label for part in parts for series in known.get(part.name, ()) for label in series}
            found += [(where, label) for label in labels_named(expression) - labels - {"le"}]
    return found


def is_there(part: Selected, known: Mapping[str, Sequence[Mapping[str, str]]]) -> bool:
    """With these labels; a value that is asked for must be one that was seen."""
    return any(
        all(label in series and value in ("", series[label]) for label, value in part.matchers.items())
        for series in known.get(part.name, ())
    )
