"""Finds the server under load: parses its URL and asks which models it serves."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.errors import ConfigError, DynamoVllmError

_PORTS = {"http": 80, "https": 443}


class BenchError(DynamoVllmError):
    """The measurement cannot run, for example because the server does not answer."""


class Target(msgspec.Struct, frozen=True):
    """The address of a server."""

    host: str
    port: int
    tls: bool
    path: str
    """The part of the URL before /v1."""
    headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{name}:{self.port}{self.path}"

    def head(self, path: str) -> bytes:
        """Return the request line and headers of a POST, up to the value of Content-Length."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {name}:{self.port}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
            "Content-Type: application/json",
            "Accept: text/event-stream",
            "Content-Length: ",
        ]
        return "\r\n".join(lines).encode()


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Parse a URL. `host:8000`, `http://host:8000/` and `http://host:8000/v1` name the same server."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ConfigError(f"{url!r} is not the URL of a server; write http://host:port")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key contains characters that are not allowed in an HTTP header")
    return Target(
        host=parts.hostname,
        port=port or _PORTS[parts.scheme],
        tls=parts.scheme == "https",
        path=parts.path.rstrip("/").removesuffix("/v1").rstrip("/"),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
    )


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model of /v1/models."""

    name: str
    context: int | None


def served_models(where: Target, timeout: float) -> list[ServedModel]:
    """Return the models of a server; none if it does not list them."""
    reply = get(f"{where.url}/v1/models", timeout, where.headers)
    if reply is None:
        return []
    try:
        listed = msgspec.json.decode(reply)["data"]
        return [ServedModel(str(entry["id"]), _context(entry)) for entry in listed]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return []


def _context(entry: dict[str, object]) -> int | None:
    """Return the model's context: vLLM and SGLang call it max_model_len, Dynamo context_window."""
    found = entry.get("max_model_len") or entry.get("context_window")
    return found if isinstance(found, int) else None


def tls_context(host: str | None) -> ssl.SSLContext:
    """Return a context that verifies certificates, except for loopback, whose name no certificate has."""
    return ssl._create_unverified_context() if host in LOOPBACK_HOSTS else ssl.create_default_context()


def get(url: str, timeout: float, headers: dict[str, str] | None = None) -> bytes | None:
    """Fetch a page of the server; return None if its status is not 200."""
    import httpx  # 0.2 s; the client processes and --help do not need it

    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc}"
    # A proxy from the environment must not get requests to this machine.
    try:
        reply = httpx.get(
            url,
            timeout=timeout,
            headers=headers,
            trust_env=parts.hostname not in LOOPBACK_HOSTS,
            verify=tls_context(parts.hostname) if parts.scheme == "https" else False,
        )
    except httpx.ConnectError as exc:
        raise BenchError(f"nothing answers at {place} ({exc}); start the server or give its URL") from None
    except httpx.TimeoutException:
        raise BenchError(f"{place} did not answer within {timeout:g} s; is the server busy?") from None
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise BenchError(f"{place}: the connection failed: {exc or type(exc).__name__}") from None
    return reply.content if reply.status_code == 200 else None
