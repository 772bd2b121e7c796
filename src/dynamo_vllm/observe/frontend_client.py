"""Calls a frontend over HTTP, for the commands that use a running system."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.errors import ConfigError, DynamoVllmError
from dynamo_vllm.observe import metrics

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    import httpx

    from dynamo_vllm.observe.metrics import MetricSample

DEFAULT_URL = "http://127.0.0.1:8000"
_CONTROLS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Unanswered(DynamoVllmError):
    """The system cannot be reached, or answered with an error; the message is for the terminal."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """Of an HTTP answer."""


class FrontendClient:
    """A client of one frontend. Every failure raises `Unanswered`."""

    def __init__(self, url: str, timeout: float) -> None:
        import httpx  # 0.2 s; --help does not need it

        if not 0 < timeout < float("inf"):  # also refuses nan
            raise ConfigError(f"--timeout {timeout:g} must be above 0")
        self.url = base(url)
        parts = urlsplit(self.url)
        # A proxy from the environment must not get requests to this machine.
        trust_env = parts.hostname not in LOOPBACK_HOSTS
        # Without TLS there is nothing to verify, and loading the authorities takes 50 ms. On loopback
        # a certificate is for another name.
        verify = parts.scheme == "https" and trust_env
        self._http = httpx.Client(base_url=self.url, timeout=timeout, trust_env=trust_env, verify=verify)

    def get(self, path: str) -> httpx.Response:
        with self._readable():
            return self._http.get(path)

    def post(self, path: str, body: dict[str, object]) -> httpx.Response:
        with self._readable():
            return self._http.post(path, json=body)

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the whole answer; an HTTP error raises with the server's message."""
        found: dict[str, Any] = answered(self.post(path, body))
        return found

    def upload(self, path: str, fields: dict[str, str], file: tuple[str, bytes]) -> Any:
        """Send a form with one file, and return the whole answer."""
        with self._readable():
            return answered(self._http.post(path, data=fields, files={"file": file}))

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """Yield the chunks of a streamed answer; closing the iterator ends the request."""
        with self._readable(), self._http.stream("POST", path, json={**body, "stream": True}) as response:
            if response.status_code != 200:
                response.read()
                answered(response)
            for data in sse_data(response.iter_lines()):
                chunk: dict[str, Any] = json.loads(data)
                if "error" in chunk:
                    raise Unanswered(f"the answer broke off: {message_of(chunk['error'])}")
                yield chunk

    def models(self) -> list[dict[str, object]]:
        response = self.get("/v1/models")
        if response.status_code != 200:
            raise Unanswered(f"{self.url}/v1/models: {reason(response)}")
        try:
            found: list[dict[str, object]] = response.json()["data"]
        except (ValueError, KeyError, TypeError):
            raise Unanswered(f"{self.url} does not speak the OpenAI API; is it a frontend?") from None
        return found

    def samples(self) -> list[MetricSample]:
        """Return every sample of the frontend's /metrics; none if it has no such page."""
        response = self.get("/metrics")
        return metrics.samples(response.text) if response.status_code == 200 else []

    def close(self) -> None:
        self._http.close()

    @contextmanager
    def _readable(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except httpx.ConnectError as exc:
            if "SSL" in str(exc):
                raise Unanswered(
                    f"{self.url}: TLS failed: {exc}; if the certificate has its own authority, set "
                    "SSL_CERT_FILE to it"
                ) from None
            raise Unanswered(
                f"nothing listens at {self.url}; start a system with 'dynamo-vllm serve' or give its URL"
            ) from None
        except httpx.TimeoutException:
            raise Unanswered(f"{self.url} did not answer in time; a longer --timeout may help") from None
        except httpx.HTTPError as exc:
            raise Unanswered(f"{self.url}: the connection failed: {exc or type(exc).__name__}") from None


def base(url: str) -> str:
    """Normalise a URL. `host:8000`, `http://host:8000/` and `http://host:8000/v1` name the same frontend."""
    whole = url if "://" in url else f"http://{url}"
    parts = urlsplit(whole)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the URL of a frontend; write http://host:port")
    return whole.rstrip("/").removesuffix("/v1").rstrip("/")


def sse_data(lines: Iterator[str]) -> Iterator[str]:
    """Yield the `data:` fields of a server-sent event stream, up to [DONE]."""
    for line in lines:
        if line.startswith("data:"):
            data = line[len("data:") :].strip()
            if data == "[DONE]":
                return
            yield data


def answered(response: httpx.Response) -> Any:
    """Return the decoded body; an HTTP error raises with the server's message."""
    if response.status_code != 200:
        raise Unanswered(reason(response), response.status_code)
    return response.json()


def reason(response: httpx.Response) -> str:
    """Return the status and message of an error response."""
    try:
        message = message_of(response.json())
    except ValueError:
        message = response.text.strip()[:200]
    return harmless(f"HTTP {response.status_code}: {message or response.reason_phrase}")


def ready_models(health: httpx.Response) -> list[str] | None:
    """Return the models that can answer, from our /health; None if the answer is not from our frontend."""
    try:
        return [str(name) for name in health.json()["models"]]
    except (ValueError, KeyError, TypeError):
        return None


def message_of(error: object) -> str:
    """Return the message of an error, from {"message": …} or {"error": {"message": …}}."""
    if isinstance(error, dict):
        return message_of(error["error"]) if "error" in error else harmless(str(error.get("message", error)))
    return harmless(str(error))


def harmless(text: str) -> str:
    """Remove control characters, because a server's text could contain escape sequences."""
    return text.translate(_CONTROLS)
