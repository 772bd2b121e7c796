"""Who may ask the console: names of the server, origins, logins."""

from __future__ import annotations

from typing import Any

from dynamo_vllm.console import security
from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.console.security import Guard
from dynamo_vllm.console.sessions import Sessions
from dynamo_vllm.console.settings import Settings


def settings(**more: Any) -> Settings:
    fields = {"host": "127.0.0.1", "port": 8001, "url": "http://d", "frontends": ("http://d",), **more}
    return Settings(**fields)


def refusal(made: Settings, method: str, path: str, **headers: str) -> int | None:
    async def nothing(*_: Any) -> None: ...

    guard = Guard(nothing, made, Sessions(made.token))
    try:
        guard.check(method, path, {name.replace("_", "-"): value for name, value in headers.items()})
    except ConsoleError as exc:
        return exc.status
    return None


def test_names_of_this_machine_are_answered_and_others_refused() -> None:
    for host in ("127.0.0.1:8001", "localhost:8001", "LOCALHOST:8001", "[::1]:8001"):
        assert refusal(settings(), "GET", "/", host=host) is None, host
    for host in (
        *("", "evil.example:8001", "127.0.0.1", "localhost:80", "127.0.0.1:8001.evil.example"),
        *("10.0.0.5:8001", "127.0.0.1:8001, 127.0.0.1:8001", "localhost.:8001", "127.0.0.1:08001x"),
        *("[::1]", "user@localhost:8001"),
    ):
        assert refusal(settings(), "GET", "/", host=host) == 421, host


def test_server_for_all_takes_addresses_and_no_names() -> None:
    made = settings(host="0.0.0.0", token="t")
    assert refusal(made, "GET", "/", host="10.0.0.5:8001") is None
    assert refusal(made, "GET", "/", host="10.0.0.5:80") == 421
    assert refusal(made, "GET", "/", host="evil.example:8001") == 421


def test_given_names_are_answered_whatever_port_a_proxy_has() -> None:
    made = settings(names=("console.example",))
    assert refusal(made, "GET", "/", host="console.example") is None
    assert refusal(made, "GET", "/", host="console.example:443") is None
    assert refusal(made, "GET", "/", host="other.console.example") == 421


HOST = "127.0.0.1:8001"
HERE = {"host": HOST, "origin": f"http://{HOST}", "x_console": "1"}


ORIGINS = (
    *("", "null", "http://localhost:8001", "http://127.0.0.1:9999", "http://evil.example"),
    *(f"file://{HOST}", f"http://evil@{HOST}"),
)


def test_request_that_changes_something_comes_from_the_page_itself() -> None:
    changed = [*({"origin": origin} for origin in ORIGINS), {"x_console": ""}, {"x_console": "2"}]
    for method in ("POST", "DELETE", "PUT", "OPTIONS"):
        assert refusal(settings(), method, "/api/actions/sleep", **HERE) is None
        for headers in changed:
            status = refusal(settings(), method, "/api/actions/sleep", **{**HERE, **headers})
            assert status == 403, (method, headers)


def test_other_pages_do_not_make_it_work() -> None:
    for path in ("/api/logs/worker-1", "/api/settings", "/v1/models"):
        for site in ("cross-site", "same-site", "same-origin, same-origin", ""):
            assert refusal(settings(), "GET", path, host=HOST, sec_fetch_site=site) == 403, (path, site)
        for site in ("same-origin", "none"):
            assert refusal(settings(), "GET", path, host=HOST, sec_fetch_site=site) is None, (path, site)
    assert refusal(settings(), "GET", "/", host=HOST, sec_fetch_site="cross-site") is None  # a link to it


def test_with_a_token_everything_but_the_page_and_the_login_needs_a_login() -> None:
    for path in ("/api/overview", "/api/live", "/v1/models", "/api/logout", "/api/settingsx"):
        assert refusal(settings(token="t"), "GET", path, host=HOST) == 401, path
        assert refusal(settings(), "GET", path, host=HOST) is None, path
    for path in ("/", "/assets/app.js", "/live", "/api/settings", "/api/login"):
        assert refusal(settings(token="t"), "GET", path, host=HOST) is None, path


def test_console_behind_a_gateway_needs_a_login_without_a_token_too() -> None:
    assert refusal(settings(admits_keys=True), "GET", "/api/overview", host=HOST) == 401
    assert refusal(settings(admits_keys=True), "GET", "/", host=HOST) is None


def test_browsers_leave_out_the_usual_ports() -> None:
    https = settings(host="0.0.0.0", port=443, names=("chat.example",))
    assert https.is_named("10.0.0.5") and https.is_named("10.0.0.5:443") and https.is_named("chat.example")
    assert not https.is_named("10.0.0.5:8443") and not https.is_named("evil.example")
    assert not settings(port=8001).is_named("127.0.0.1")


def test_cookies_of_others_do_not_hide_ours_and_bad_ones_count_as_none() -> None:
    made = settings(token="t")
    assert security.session_of({"cookie": "a=1; console-8001=x; console-8002=y"}, made) == "x"
    odd = 'theme={"dark": true}; [a]=1; b"c; console-8001=x; d@e=f g'
    assert security.session_of({"cookie": odd}, made) == "x"
    assert security.session_of({"cookie": "xconsole-8001=x; console-80011=x"}, made) is None
    assert security.session_of({"cookie": "\x00=;;;"}, made) is None
    assert security.session_of({}, made) is None


def test_header_that_comes_twice_fits_nothing() -> None:
    scope = {"headers": [(b"Host", b"a"), (b"host", b"b"), (b"cookie", b"x=1"), (b"cookie", b"y=2")]}
    assert security.headers_of(scope) == {"host": "a, b", "cookie": "x=1; y=2"}
