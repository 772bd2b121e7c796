"""The routes of a running frontend and of a worker's system port are those that docs/security.md lists."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import re
import urllib.parse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest

from dynamo_vllm.serving.system_port.routes import ROUTES
from harness.processes import free_port
from harness.stack import Stack, stack
from harness.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
PASSED_ON = {"GET /live", "GET /health", "GET /metrics", "GET /v1/metadata/{*file}"}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
# Routes of other versions and settings of the runtime; in its binary, strings run into each other.
KNOWN = (
    "/busy_threshold",
    "/clear_kv_blocks",
    "/docs",
    "/engine/control/start_profile",
    "/generate",
    "/inference/v1/generate",
    "/metadata",
    "/openapi.json",
    "/v1/batches",
    "/v1/files",
    "/v1/loras",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/rl/workers",
    "/v1/tokenize",
    "/v1/traces",
    "/v2/models",
)


def listed(section: str) -> dict[str, re.Pattern[str]]:
    """The routes in a section's table, and what each of them matches."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", text, re.MULTILINE)
    assert len(found) == len(set(found))
    return {route: pattern(route) for route in found}


def pattern(route: str) -> re.Pattern[str]:
    parts = re.split(r"(\{\*?\w+\})", route)
    some = {True: ".*", False: "[^/]+"}
    return re.compile("".join(some[p[1] == "*"] if p[:1] == "{" else re.escape(p) for p in parts))


def in_the_binary() -> set[str]:
    """Every string of the runtime that could be a path."""
    spec = find_spec("dynamo._core")
    assert spec is not None and spec.origin is not None
    strings = re.findall(rb"/[a-z_][a-z0-9_{}*/.]{2,40}", Path(spec.origin).read_bytes())
    return {found.decode() for found in strings if b".rs" not in found and b"//" not in found}


def walked(url: str) -> set[str]:
    """What a server has at any of these paths; a path with another method is answered with 405.

    With Python's own client: httpx takes most of the time of thousands of requests for itself.
    """
    target = httpx.URL(url)
    with contextlib.closing(http.client.HTTPConnection(target.host, target.port, timeout=30)) as connection:

        def status(method: str, path: str) -> int:
            connection.request(method, urllib.parse.quote(path, safe="/*"))
            reply = connection.getresponse()
            reply.read()
            return reply.status

        paths = [path for path in sorted(in_the_binary() | set(KNOWN)) if status("GET", path) != 404]
        asked = itertools.product(METHODS, paths)
        found = {f"{method} {path}" for method, path in asked if status(method, path) not in (404, 405)}
    assert found
    return found


def unlisted(routes: set[str], table: dict[str, re.Pattern[str]]) -> set[str]:
    return {route for route in routes if not any(known.fullmatch(route) for known in table.values())}


@pytest.fixture(scope="module")
def card_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def running(model: Path, card_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("routes")) as made:
        made.start_frontend()
        made.start_worker("--model", str(model), "--engine", "fake", "--card-port", str(card_port))
        yield made.wait_ready()


def test_every_route_of_the_frontend_is_listed(running: Stack) -> None:
    table = listed("Routes of the frontend")
    described = running.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    assert unlisted(routes | walked(running.url), table) == set()
    missing = set(table) - routes - {"GET /openapi.json", "GET /docs", "GET /docs/{*file}"}
    assert missing == {"GET /busy_threshold", "POST /busy_threshold"}


def test_nobody_sets_from_which_load_on_all_are_refused(running: Stack) -> None:
    name = running.models()[0]
    closing = {"model": name, "active_decode_blocks_threshold": 0.0, "active_prefill_tokens_threshold": 0}
    assert running.get("/busy_threshold").status_code == 404
    assert running.post("/busy_threshold", closing).status_code == 404
    asked = {"model": name, "prompt": "hello", "max_tokens": 2}
    assert running.post("/v1/completions", asked).status_code == 200


def test_operator_can_open_the_thresholds(running: Stack, tmp_path: Path) -> None:
    with stack(tmp_path) as made:
        made.start_frontend("--frontend-admin-api", env={"DYN_FILE_KV": running.environment()["DYN_FILE_KV"]})
        until("the second frontend", lambda: made.get("/health").status_code == 200)
        assert made.get("/busy_threshold").status_code == 200


def test_every_route_of_the_system_port_is_listed(running: Stack) -> None:
    table = listed("Routes of the system port")
    (worker,) = running.workers
    verbs = {f"{way.method} /{'/'.join(way.parts)}".replace("{", "{*") for way in ROUTES}
    assert unlisted(verbs | walked(worker.system_url), table) == set()
    assert set(table) == verbs | PASSED_ON


def test_port_of_the_card_has_no_verb(running: Stack, card_port: int) -> None:
    table = listed("Routes of the system port")
    url = f"http://127.0.0.1:{card_port}"
    read_only = {
        route: known for route, known in table.items() if "/engine" not in route and "lora" not in route
    }
    assert unlisted(walked(url), read_only) == set()
    for method, path in (("POST", "/v1/loras"), ("DELETE", "/v1/loras/x"), ("POST", "/engine/sleep")):
        assert httpx.request(method, url + path, timeout=30).status_code == 404
