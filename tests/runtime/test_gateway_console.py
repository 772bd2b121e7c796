"""The web console of a `serve --gateway`: at /console/ of Envoy for operators, with keys and usage."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import gateway as gateways
from harness.gateway import Gateway
from harness.processes import free_port
from harness.waiting import until

pytestmark = pytest.mark.more

NAME = "console.example"
PAGE = "https://page.example"


@dataclass
class Behind:
    """A deployment with its console, on a port of its own and behind the gateway."""

    gateway: Gateway
    port: int
    admin: str
    """Secret of a key with --admin."""
    tenant: str
    clients: contextlib.ExitStack

    def browser(self, host: str | None = None) -> Browser:
        return self._opened(Browser(f"{self.gateway.url}/console/", host))

    def local(self) -> Browser:
        return self._opened(Browser(f"http://127.0.0.1:{self.port}/", None))

    def _opened(self, browser: Browser) -> Browser:
        self.clients.enter_context(browser.http)
        return browser


class Browser:
    """A client that keeps cookies and asks as the page does."""

    def __init__(self, url: str, host: str | None) -> None:
        base = httpx.URL(url)
        self.host = host or base.netloc.decode()
        self.http = httpx.Client(base_url=base, headers={"Host": self.host}, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        ours = {"X-Console": "1", "Origin": f"http://{self.host}"}
        return self.http.post(path, json=body, headers={**ours, **headers})

    def login(self, secret: str) -> httpx.Response:
        return self.post("api/login", {"token": secret})

    def act(self, verb: str, **body: Any) -> dict[str, Any]:
        (found,) = self.post(f"api/actions/{verb}", {"body": body}).json()["results"]
        assert found["ok"], found
        reply: dict[str, Any] = found["reply"]
        return reply


@pytest.fixture(scope="module")
def behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """Without an admin token: only keys log in. A stream may be idle for a second, which no event may be."""
    port = free_port()
    words = ("--console", "--gateway-console", "--console-port", str(port), "--console-hosts", NAME)
    more = ("--cors-origin", PAGE, "--stream-idle-seconds", "1")
    with gateways.fake_gateway(tmp_path_factory.mktemp("console"), *words, *more) as made:
        until("the console's line", lambda: "console: http" in made.serving.process.written())
        admin, tenant = made.create_key("ops", "--admin"), made.create_key("alice", "--tenant", "research")
        with contextlib.ExitStack() as clients:
            yield Behind(made, port, admin, tenant, clients)


@pytest.fixture
def operator(behind: Behind) -> Browser:
    """Somebody who has logged in through the gateway."""
    made = behind.browser()
    assert made.login(behind.admin).status_code == 200
    return made


# --- who gets in ------------------------------------------------------------------------------------------


def test_without_a_login_there_is_the_page_and_nothing_else(behind: Behind) -> None:
    somebody = behind.browser()
    page = somebody.get("")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "script-src 'self'" in page.headers["content-security-policy"]
    assert somebody.get("assets/app.js").status_code == 200
    for secret in (behind.admin, behind.gateway.key):
        for headers in ({"Authorization": f"Bearer {secret}"}, {"X-Api-Key": secret}):
            assert somebody.get("api/overview", **headers).status_code == 401
    found = somebody.get("api/settings").json()
    assert (found["needs_login"], found["logged_in"], found["models"], found["actions"]) == (1, 0, [], [])
    assert (found["url"], found["version"], found["namespace"], found["grafana"]) == (None,) * 4
    for path in ("api/overview", "api/live", "api/logs", "api/logs/console", "api/requests", "v1/models"):
        assert somebody.get(path).status_code == 401, path
    for path in ("api/actions/keys_list", "api/actions/drain", "api/bench", "v1/chat/completions"):
        assert somebody.post(path, {}).status_code == 401, path


def test_on_loopback_and_behind_the_gateway_a_key_with_admin_logs_in(behind: Behind) -> None:
    """Sessions, cookies and limits of logins are in tests/unit/console."""
    for somebody in (behind.local(), behind.browser()):
        for secret in (behind.tenant, behind.gateway.key, "wrong"):
            assert somebody.login(secret).status_code == 401
        assert somebody.login(behind.admin).status_code == 200
        assert "processes" in somebody.get("api/overview").json()
    somebody, spoofed = behind.local(), {"X-Gateway-Client": "10.0.0.9"}
    told = [somebody.post("api/login", {"token": "x"}, **spoofed).status_code for _ in range(12)]
    assert told[-1] == 429
    # Who comes through the gateway has an address, which no client can choose.
    assert behind.browser().post("api/login", {"token": "x"}, **spoofed).status_code == 401


# --- what pages of others can do --------------------------------------------------------------------------


def test_other_names_are_refused(behind: Behind) -> None:
    for host in ("evil.example", f"evil.example:{behind.port}", "127.0.0.1:1", f"127.0.0.1:{behind.port}"):
        assert behind.browser(host=host).get("").status_code == 421, host
    named = behind.browser(host=NAME)
    assert named.get("").status_code == 200
    assert named.login(behind.admin).status_code == 200


def test_other_origins_are_refused(behind: Behind, operator: Browser) -> None:
    for more in ({"Origin": PAGE}, {"Origin": "null"}, {"X-Console": ""}):
        assert operator.post("api/actions/keys_list", {}, **more).status_code == 403
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-console"}
    preflight = operator.http.request("OPTIONS", "api/overview", headers={"Origin": PAGE, **asked})
    read = operator.get("api/settings", Origin=PAGE)
    assert not [name for reply in (preflight, read) for name in reply.headers if "allow-origin" in name]
    with behind.gateway.client() as client:  # the APIs are for that page
        allowed = client.get("/v1/models", headers={"Origin": PAGE})
        assert allowed.headers["access-control-allow-origin"] == PAGE


def test_path_leads_nowhere_else(behind: Behind, operator: Browser) -> None:
    with behind.gateway.client(key="") as client:
        moved = client.get("/console", headers={"Host": operator.host})
        assert (moved.status_code, moved.headers["location"]) == (308, "console/")
        for path in ("/consolex", "/console/../metrics", "/console/..%2fmetrics", "/console/%2e%2e/docs"):
            assert client.get(path).status_code in (400, 401, 404), path
    assert operator.get("api/logs/..%2f..%2fserve.json").status_code in (400, 404)


# --- what operators do ------------------------------------------------------------------------------------


def test_events_come_as_they_happen_and_are_not_cut_off(operator: Browser) -> None:
    samples = 0
    with operator.http.stream("GET", "api/live") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            samples += line == "event: sample"
            if samples == 3:  # one in two seconds; a stream of the gateway may be idle for one
                return


def test_models_are_asked_with_the_key_that_was_typed(behind: Behind, operator: Browser) -> None:
    body = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert operator.post("v1/chat/completions", body).status_code == 401  # the gateway's word
    typed = {"Authorization": f"Bearer {behind.tenant}"}
    answer = operator.post("v1/chat/completions", body, **typed)
    assert answer.status_code == 200, answer.text


def test_keys_are_created_limited_and_revoked_and_usage_is_shown(behind: Behind, operator: Browser) -> None:
    """A key is created, asks, is limited, has its usage read and is revoked; no secret is told twice."""
    gateway = behind.gateway
    made = operator.act("keys_create", name="bob", tenant="sales", requests_per_minute=1000)
    secret, prefix = made["secret"], made["key"]
    body = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    with gateway.client(key=secret) as bob:
        until("the key", lambda: bob.post("/v1/chat/completions", json=body).status_code == 200)
        key = {one["key"]: one for one in operator.act("keys_list")["keys"]}[prefix]
        assert (key["name"], key["tenant"], key["state"]) == ("bob", "sales", "active")
        assert key["requests_per_minute"] == 1000
        operator.act("keys_limits", tenant="sales", requests_per_minute=1)
        tenants = {one["tenant"]: one for one in operator.act("keys_list")["tenants"]}
        assert tenants["sales"]["requests_per_minute"] == 1
        until("the limit", lambda: bob.post("/v1/chat/completions", json=body).status_code == 429)

        def used() -> bool:
            rows = {one["name"]: one for one in operator.act("usage", by="tenant")["rows"]}
            return "sales" in rows and rows["sales"]["requests"] > 0 and rows["sales"]["output_tokens"] > 0

        until("its usage", used)
        assert prefix in {one["name"].split()[0] for one in operator.act("usage", by="key")["rows"]}
        operator.act("keys_revoke", key=prefix)
        until("its end", lambda: bob.post("/v1/chat/completions", json=body).status_code == 401)
    assert {one["key"]: one["state"] for one in operator.act("keys_list")["keys"]}[prefix] == "revoked"
    told = [
        operator.get(path).text
        for path in ("api/settings", "api/overview", "api/requests", "api/logs/console")
    ]
    told += [json.dumps(operator.act(verb)) for verb in ("keys_list", "usage")]
    files = [path.read_bytes() for path in gateway.run_folder.rglob("*") if path.is_file()]
    for hidden in (secret, behind.admin):
        assert not any(hidden in text for text in told)
        assert not any(hidden.encode() in text for text in files)
        assert hidden not in gateway.serving.process.written()
    assert "keys_create" in gateway.log("console") and prefix in gateway.log("console")


def test_console_that_was_killed_comes_back_behind_the_gateway(behind: Behind) -> None:
    behind.gateway.serving.called("--gateway-socket=").kill()
    until("it to be gone", lambda: behind.browser().get("live").status_code == 503)
    until("it to be back", lambda: behind.browser().get("live").status_code == 200)
    assert behind.browser().login(behind.admin).status_code == 200


# --- without it -------------------------------------------------------------------------------------------


def test_by_default_it_is_only_on_loopback_and_its_token_logs_in(tmp_path: Path) -> None:
    port, token = free_port(), "a-token-of-an-operator"
    words = (*gateways.FAKE, "--console", "--console-port", str(port))
    with gateways.gateway(tmp_path, *words, DYN_VLLM_ADMIN_TOKEN=token) as made:
        until("the console's line", lambda: "console: http" in made.serving.process.written())
        key = made.create_key("ops", "--admin")
        with made.client(key=key) as client:
            for path in ("/console", "/console/", "/console/api/settings"):
                assert client.get(path).status_code == 404
        local = Browser(f"http://127.0.0.1:{port}/", None)
        with local.http:
            assert local.login(key).status_code == 401
            assert local.post("api/actions/keys_list", {}).status_code == 401
            assert local.login(token).status_code == 200
            assert local.act("keys_list")["keys"]
