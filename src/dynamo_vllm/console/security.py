"""Lets only the page itself and its user through, and tells browsers what the page may do.

A console on loopback can be called by every web page that its user opens. So the Host header must name this
server (against names that point here), a request that changes something must come from our own origin with
a header that other origins cannot send without asking, and no answer may be read or framed by another. What
a browser asks for another page is not even made: some answers cost seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.requests import cookie_parser

from dynamo_vllm.console.replies import JSON, ConsoleError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from dynamo_vllm.console.sessions import Sessions
    from dynamo_vllm.console.settings import Settings

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}
NOT_KEPT = ("/api", "/v1")
"""Browsers keep no copy of what is below."""
OPEN = ("/live", "/api/settings", "/api/login")
"""Paths below NOT_KEPT, and the health check, that need no login."""
READS = ("GET", "HEAD")
MARK = "x-console"
OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of the page itself, and of the user; other programs send none."""


class Guard:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp, settings: Settings, sessions: Sessions) -> None:
        self._app = app
        self._settings = settings
        self._sessions = sessions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        added = dict(HEADERS)
        if path.startswith(NOT_KEPT):
            added["cache-control"] = "no-store"

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [(n, v) for n, v in message["headers"] if n.decode("latin-1").lower() not in added]
                message["headers"] = [*kept, *((n.encode(), v.encode()) for n, v in added.items())]
            await send(message)

        try:
            self.check(scope["method"], path, headers_of(scope))
        except ConsoleError as exc:
            body = exc.body()
            headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(body)).encode())]
            await send_guarded({"type": "http.response.start", "status": exc.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send_guarded)

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raise for a request that must not be answered."""
        host = headers.get("host", "")
        if not self._settings.is_named(host):
            raise ConsoleError(
                421,
                f"{host!r} is not a name of this console",
                "add it with --console-hosts, or use another URL",
            )
        if path.startswith(NOT_KEPT) and headers.get("sec-fetch-site", "none") not in OWN_SITES:
            raise ConsoleError(403, "this request comes from another page", "use the console's own page")
        if method not in READS:
            if not _is_same_origin(headers.get("origin"), host):
                raise ConsoleError(403, "this request comes from another page", "use the console's own page")
            if headers.get(MARK) != "1":
                raise ConsoleError(403, "the header 'X-Console: 1' is missing", "use the console's own page")
        needs_login = self._settings.needs_login and path.startswith(NOT_KEPT) and path not in OPEN
        if needs_login and not self._sessions.is_open(session_of(headers, self._settings)):
            raise ConsoleError(401, "log in first", f"give {self._sessions.words}")


def _is_same_origin(origin: str | None, host: str) -> bool:
    if not origin:
        return False
    parts = urlsplit(origin)
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.lower()


def headers_of(scope: Scope) -> dict[str, str]:
    """Return the headers by name; of a header that came twice all values, which then fit nothing."""
    found: dict[str, str] = {}
    for raw, value in scope["headers"]:
        name, text = raw.decode("latin-1").lower(), value.decode("latin-1")
        joint = "; " if name == "cookie" else ", "
        found[name] = f"{found[name]}{joint}{text}" if name in found else text
    return found


def session_of(headers: Mapping[str, str], settings: Settings) -> str | None:
    return cookie_parser(headers.get("cookie", "")).get(settings.cookie)
