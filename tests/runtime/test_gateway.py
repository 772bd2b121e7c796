"""Envoy and the control app in front of a frontend that says what it got."""

from __future__ import annotations

import concurrent.futures
import gzip
import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.control.bodies import PINS
from dynamo_vllm.gateway.envoy import config, routes
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.keys import Limits, Scopes
from harness import gateway_alone, processes
from harness.echo_frontend import HOLD, MISSING, SLOTS
from harness.gateway_alone import CHAT, FIXED, Gateway
from harness.waiting import until


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway_alone.gateway(folder, "--cors-origin", "https://page.example") as made:
        yield made


def error(reply: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = reply.json()["error"]
    return found


# --- keys -------------------------------------------------------------------------------------------------


def test_nobody_gets_in_without_a_key(gateway: Gateway) -> None:
    for secret in (None, "wrong", FIXED.upper()):
        reply = gateway.ask(secret)
        assert reply.status_code == 401, secret
        assert reply.headers["www-authenticate"] == "Bearer"
        assert error(reply)["code"] in ("missing_api_key", "invalid_api_key")


def test_credentials_do_not_reach_the_frontend(gateway: Gateway) -> None:
    for key in (
        {"authorization": f"Bearer {FIXED}"},
        {"authorization": f"bearer {FIXED}"},
        {"x-api-key": FIXED},
    ):
        reply = gateway.ask(None, headers={**key, "cookie": "a=b", "proxy-authorization": "x"})
        assert reply.status_code == 200
        assert not set(config.CREDENTIALS) & set(reply.json()["headers"]) and FIXED not in reply.text


def test_a_revoked_or_expired_key_ends_soon_and_a_new_one_begins_soon(gateway: Gateway) -> None:
    key, secret = gateway.key("leaver")
    until("the key to work", lambda: gateway.ask(secret).status_code == 200, every=0.05)
    gateway.database.run_now(keys.revoke(key.id))
    until("the key to end", lambda: gateway.ask(secret).status_code == 401, every=0.05)
    assert "revoked" in error(gateway.ask(secret))["message"]
    _, old = gateway.key("guest", expires=1.0)
    until("the key to be known", lambda: "expired" in error(gateway.ask(old))["message"], every=0.05)


def test_keys_are_in_no_log_and_no_command_line(gateway: Gateway) -> None:
    secret = gateway.secret("writer")
    gateway.get(f"/v1/models?api_key={secret}", secret)
    until("the log", lambda: "/v1/models" in gateway.process.written())
    lines = [" ".join(process.cmdline()) for process in gateway.process.tree()]
    files = [path.read_bytes() for path in gateway.folder.rglob("*") if path.is_file()]
    for hidden in (secret, FIXED):
        assert not any(hidden in line for line in lines)
        assert not any(hidden.encode() in text for text in files)


# --- what clients may not say -----------------------------------------------------------------------------

INTERNAL = (
    *config.ONLY_OURS_EXACT,
    *identity.FOR_FRONTEND,
    *(identity.KEY, identity.TENANT, identity.CLASS, identity.ADMIN),
    *(identity.MODEL, identity.MODELS, config.DECLARED, routes.CHOICE),
    *("x-dynamo-meta-tenant", "x-dynamo-meta-policy-class", "x-dynamo-worker-instance-id"),
    *("x-dynamo-prefill-instance-id", "x-dynamo-dp-rank", "x-dynamo-prefill-dp-rank", "x-dynamo-request-id"),
    *("x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final", "X-Dynamo-Meta-Gateway"),
)


def test_an_internal_header_of_a_client_has_no_effect(gateway: Gateway) -> None:
    """Nor one that others may read as such."""
    plain = gateway.ask().json()["headers"]
    for name in (*INTERNAL, "x_tenant_id", "x-tenant_id", "X_Dynamo_Meta_Gateway"):
        spoofed = gateway.ask(headers={name: "spoofed-1"}).json()["headers"]
        assert "spoofed-1" not in spoofed.values(), name
        assert set(spoofed) == set(plain), name


def test_a_client_cannot_choose_the_name_of_its_request(gateway: Gateway) -> None:
    replies = [gateway.ask(headers={identity.REQUEST: "mine"}).json() for _ in range(2)]
    assert len({"mine", *(reply["headers"][identity.REQUEST] for reply in replies)}) == 3


def test_a_request_cannot_choose_its_worker(gateway: Gateway) -> None:
    """The rest of nvext passes; tests/unit/gateway/control/test_bodies.py has pins in other words."""
    for field in PINS:
        reply = gateway.ask(nvext={field: 7})
        assert (reply.status_code, error(reply)["param"]) == (400, f"nvext.{field}")
    assert gateway.ask(nvext={"extra_fields": ["timing"], "max_thinking_tokens": 5}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/../metrics", "/v1/%2e%2e/metrics", "//metrics", "/./metrics", "/v1/models/../../instances"),
        *("/v1/chat/completions/../../../metrics", "/metrics", "/metrics?x=/v1/models", "/metrics/"),
        *("/METRICS", "/v1%2f..%2fmetrics", "/v1/models%2f..%2f..%2fmetrics", "/%6detrics", "/nothing"),
    ],
)
def test_no_spelling_of_a_path_leads_past_the_table(gateway: Gateway, path: str) -> None:
    with socket.create_connection(("127.0.0.1", int(gateway.url.rpartition(":")[2]))) as raw:
        raw.sendall(
            f"GET {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {FIXED}\r\nconnection: close\r\n\r\n".encode()
        )
        reply = b"".join(iter(lambda: raw.recv(65536), b""))
    assert int(reply.split(b" ", 2)[1]) in (400, 403, 404), reply


def test_admin_paths_need_an_admin_key_and_health_none(gateway: Gateway) -> None:
    secret = gateway.secret("operator", scopes=Scopes(admin=True))
    for key, status in ((secret, 200), (FIXED, 403), (None, 401)):
        assert gateway.get("/metrics", key).status_code == status
    assert [gateway.get(path, None).status_code for path in ("/live", "/health")] == [200, 200]


def test_a_response_that_needs_no_history_goes_straight_to_the_frontend(gateway: Gateway) -> None:
    direct: list[dict[str, Any]] = [{"store": False}, {"store": False, "background": False}]
    for body in (*direct, {"store": False, "stream": True}):
        got = gateway.ask(path="/v1/responses", input="x", **body).json()
        assert "x-forwarded-for" in got["headers"], body
    kept: list[dict[str, Any]] = [{}, {"store": True}, {"store": False, "background": True}]
    for body in (*kept, {"store": False, "previous_response_id": "resp_1"}):
        reply = gateway.ask(path="/v1/responses", input="x", **body)
        assert "x-forwarded-for" not in reply.json().get("headers", {}), body


# --- scopes and limits ------------------------------------------------------------------------------------


def test_a_key_for_some_models_and_endpoints_opens_no_other(gateway: Gateway) -> None:
    secret = gateway.secret("narrow", scopes=Scopes(models=("m", "modèle-研究"), endpoints=("chat",)))
    assert gateway.ask(secret, "/v1/completions").status_code == 403
    assert gateway.ask(secret, model="modèle-研究").status_code == 200
    for model in ("other", None, ["m"], "", "m ", "modèle"):
        reply = gateway.ask(secret, model=model)
        assert (reply.status_code, error(reply)["param"]) == (403, "model"), model
    until("the line", lambda: '"model":"modèle-研究"' in gateway.process.written())


def test_limits_models_and_pins_hold_however_json_is_called(gateway: Gateway) -> None:
    """Bodies that Envoy and the frontend could read otherwise; tests/unit/gateway/control has all of them."""
    limits = Limits(tokens_per_day=5000)
    secret = gateway.secret("speller", tenant="speller", scopes=Scopes(models=("m",)), limits=limits)
    large = b'{"model": "m", "max_tokens": 9000}'
    cases = [
        *((large + b' {"model": "m"}', 400), (gzip.compress(large), 400), (b"", 400)),
        *((b'{"model": "other", "max_tokens": 1}', 403), (b'{"model": "m", "max_tokens": 1}', 200)),
    ]

    def status(body: bytes, content_type: str | None) -> int:
        headers = {"authorization": f"Bearer {secret}"} | (
            {"content-type": content_type} if content_type else {}
        )
        return gateway.client.post(gateway.url + CHAT, content=body, headers=headers).status_code

    for content_type in ("application/json; charset=utf-8", "application/x+json"):
        assert [status(body, content_type) for body, _ in cases] == [wanted for _, wanted in cases]
    for other in ("text/plain", None):
        assert status(b'{"model": "m", "max_tokens": 1}', other) == 415


def test_requests_per_minute_are_counted(gateway: Gateway) -> None:
    secret = gateway.secret("slow", tenant="slow", limits=Limits(requests_per_minute=3))
    replies = [gateway.ask(secret) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    assert [reply.headers["x-ratelimit-remaining-requests"] for reply in replies] == ["2", "1", "0", "0"]
    assert int(replies[3].headers["retry-after"]) >= 1
    assert error(replies[3])["code"] == "rate_limit_exceeded"


def test_a_request_that_the_frontend_refuses_gives_its_tokens_back(gateway: Gateway) -> None:
    secret = gateway.secret("wrong", tenant="wrong", limits=Limits(tokens_per_minute=1500))
    assert gateway.ask(secret, model=MISSING, max_tokens=1400).status_code == 404
    until("its tokens", lambda: gateway.ask(secret, max_tokens=1400).status_code == 200, 20, every=0.1)


def test_concurrent_requests_are_counted_until_they_end(gateway: Gateway) -> None:
    secret = gateway.secret("busy", tenant="busy", limits=Limits(concurrent=2))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        try:
            running = [pool.submit(gateway.ask, secret, model=HOLD) for _ in range(2)]
            assert all(gateway.echo.held.acquire(timeout=30) for _ in running)
            assert gateway.ask(secret).status_code == 429
        finally:
            gateway.echo.may_answer.set()
        assert [future.result().status_code for future in running] == [200, 200]
    gateway.echo.may_answer.clear()
    until("room for another", lambda: gateway.ask(secret).status_code == 200, every=0.1)


# --- the connection ---------------------------------------------------------------------------------------


def test_too_much_is_refused_with_a_sentence(gateway: Gateway) -> None:
    large = gateway.client.post(
        gateway.url + CHAT,
        content=b" " * (46 << 20),
        headers={"x-api-key": FIXED, "content-type": "application/json"},
    )
    assert large.status_code == 413
    assert large.json()["error"]["code"]
    assert gateway.ask(headers={"x-long": "a" * (80 << 10)}).status_code == 431
    assert gateway.ask().status_code == 200


def test_a_web_page_may_call_it_from_its_own_origin_only(gateway: Gateway) -> None:
    def preflight(origin: str) -> httpx.Response:
        headers = {"origin": origin, "access-control-request-method": "POST"}
        return gateway.client.options(gateway.url + CHAT, headers=headers)

    assert preflight("https://page.example").headers["access-control-allow-origin"] == "https://page.example"
    assert "access-control-allow-origin" not in preflight("https://other.example").headers


def test_the_access_log_has_who_and_what_but_no_text(gateway: Gateway) -> None:
    gateway.client.post(
        f"{gateway.url}{CHAT}?secret=query-text",
        json={"model": "logged-model", "messages": [{"role": "user", "content": "prompt-text"}]},
        headers={"x-api-key": FIXED},
    )
    until("the line", lambda: "logged-model" in gateway.process.written())
    written = gateway.process.written()
    (line,) = [json.loads(line) for line in written.splitlines() if "logged-model" in line]
    assert (line["key"], line["tenant"], line["path"], line["status"]) == ("flag-1", "default", CHAT, 200)
    assert "prompt-text" not in written and "query-text" not in written


def test_an_open_gateway_is_for_programs_and_not_for_pages_of_others(tmp_path: Path) -> None:
    origin = "https://page.example"
    with gateway_alone.gateway(tmp_path, "--open", "--cors-origin", origin) as made:

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return made.ask(None, headers=named).status_code

        assert status() == 200
        assert status(host="localhost:1") == 200
        assert status(host="rebound.evil.example") == 421
        assert status(sec_fetch_site="cross-site") == 403
        assert status(origin="https://evil.example") == 403
        assert status(origin=origin, sec_fetch_site="cross-site") == 200


def test_tls_and_http_2(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN=localhost"
    command = ["openssl", *words.split(), "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    files = ("--tls-cert-path", str(certificate), "--tls-key-path", str(key))
    with gateway_alone.gateway(tmp_path, *files) as made:
        assert made.ask().status_code == 200
        context = ssl.create_default_context(cafile=str(certificate))
        context.check_hostname = False
        context.set_alpn_protocols(["h2"])
        port = int(made.url.rpartition(":")[2])
        with context.wrap_socket(socket.create_connection(("127.0.0.1", port))) as wrapped:
            assert wrapped.selected_alpn_protocol() == "h2"
            assert wrapped.version() in ("TLSv1.2", "TLSv1.3")


def test_two_gateways_share_the_slots(tmp_path: Path) -> None:
    ports = [processes.free_ports(2) for _ in range(2)]

    def slots(port: int) -> str:
        try:
            text = httpx.get(f"http://127.0.0.1:{port + 1}/metrics").text
        except httpx.TransportError:
            return ""
        return next((line for line in text.splitlines() if line.startswith("dynamo_gateway_slots")), "")

    with gateway_alone.gateway(tmp_path, "--status-port", str(ports[0])):
        until("all slots", lambda: slots(ports[0]).endswith(f" {SLOTS}"))
        with gateway_alone.gateway(tmp_path, "--status-port", str(ports[1])):
            until("halves", lambda: all(slots(port).endswith(f" {SLOTS // 2}") for port in ports))
