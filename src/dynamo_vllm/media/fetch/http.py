"""Fetches the bytes of a URL, within limits of size, time and redirects.

Uses httpcore, which follows no redirects, decompresses nothing, keeps no cookies and ignores proxy variables:
each of these is decided here.
"""

from __future__ import annotations

import binascii
import logging
import re
import ssl
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import anyio
import httpcore
import httpx
import pybase64

from dynamo_vllm import __version__
from dynamo_vllm.errors import MediaRefused, MediaTooLarge, MediaTypeUnknown
from dynamo_vllm.media.base import MEGABYTE
from dynamo_vllm.media.fetch import addresses

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.fetch.addresses import Reach, Resolve

logger = logging.getLogger(__name__)

MAX_URL = 8192
"""Characters of a URL other than data:."""
_HOST = re.compile(rb"[a-z0-9._-]+|[0-9a-f:.]+", re.IGNORECASE)
_REDIRECTS = frozenset((301, 302, 303, 307, 308))
_HEADERS = [
    (b"User-Agent", f"dynamo-vllm/{__version__}".encode()),
    (b"Accept", b"image/*, video/*, audio/*"),
    # Otherwise a few bytes may become gigabytes; a compressed answer is refused below.
    (b"Accept-Encoding", b"identity"),
]


def too_many_bytes(max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(f"this is larger than {max_bytes / MEGABYTE:g} MB")


def read_data_url(url: str, max_bytes: int) -> bytes:
    """Blocks while base64 is decoded."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise MediaRefused("a data: URL must be in base64: data:image/png;base64,…")
    if len(text) // 4 * 3 > max_bytes + 2:
        raise too_many_bytes(max_bytes)
    try:
        # Several times as fast as the standard library's, which blocks all other threads.
        data = pybase64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise MediaRefused("the data: URL is not valid base64") from None
    if len(data) > max_bytes:
        raise too_many_bytes(max_bytes)
    return data


@dataclass(frozen=True, slots=True)
class Hop:
    """One URL of a redirect chain, with its parts as they are sent."""

    url: httpx.URL

    @classmethod
    def parse(cls, text: str, base: Hop | None = None) -> Hop:
        try:
            url = httpx.URL(text) if base is None else base.url.join(text)
        except (httpx.InvalidURL, ValueError, TypeError):
            raise MediaRefused("this is not a URL") from None
        if url.scheme not in ("http", "https"):
            raise MediaRefused(
                f"{url.scheme[:20] or 'nothing'}: is not supported; use http, https, data or file"
            )
        if not _HOST.fullmatch(url.raw_host) or (url.port is not None and not 0 < url.port < 1 << 16):
            raise MediaRefused("the URL has no valid host or port")
        if url.userinfo:
            raise MediaRefused("a URL with a user name or password is not allowed; leave them out")
        return cls(url)

    @property
    def host(self) -> str:
        return self.url.raw_host.decode("ascii")


class MediaClient:
    """Connections to media servers; only to addresses that were checked."""

    def __init__(self, limits: MediaLimits, reach: Reach, system: Resolve) -> None:
        self._limits = limits
        self._reach = reach
        self._network = CheckedNetwork(reach, system)
        self._tls = reach.tls or _ssl_context()

    async def get(self, url: str) -> bytes:
        """The caller limits the time."""
        hop = Hop.parse(url)
        # A pool per request: httpcore 1.0 never returns a connection whose request was cancelled between
        # connecting and sending, so a shared pool would fill up.
        async with httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=self._network) as pool:
            for _ in range(self._limits.redirects + 1):
                self._reach.check_name(hop.host)
                answer = await self._request(pool, hop)
                if isinstance(answer, bytes):
                    return answer
                hop = answer
        raise MediaRefused(f"redirected more than {self._limits.redirects} times")

    async def _request(self, pool: httpcore.AsyncConnectionPool, hop: Hop) -> bytes | Hop:
        """Return the body, or the redirect."""
        host = hop.url.netloc
        timeout = self._limits.timeout_seconds
        try:
            async with pool.stream(
                "GET",
                httpcore.URL(
                    scheme=hop.url.raw_scheme,
                    host=hop.url.raw_host,
                    port=hop.url.port,
                    target=hop.url.raw_path,
                ),
                headers=[(b"Host", host), *_HEADERS],
                extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), timeout)},
            ) as response:
                return await self._read_response(hop, response)
        except (httpcore.TimeoutException, TimeoutError):
            raise MediaRefused(f"the server did not answer within {timeout:g} s") from None
        except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as exc:
            logger.debug("media: %s: %r", hop.host, exc)
            raise MediaRefused("the server cannot be reached, or closed the connection") from None

    async def _read_response(self, hop: Hop, response: httpcore.Response) -> bytes | Hop:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS:
            if b"location" not in headers:
                raise MediaRefused("the server sent a redirect without a location")
            return Hop.parse(headers[b"location"].decode("latin-1"), hop)
        if response.status != 200:
            raise MediaRefused(f"the server answered with status {response.status}")
        if headers.get(b"content-encoding", b"identity").strip().lower() not in (b"identity", b""):
            raise MediaTypeUnknown("the server sent compressed data, which is not supported")
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.max_bytes:
            raise too_many_bytes(self._limits.max_bytes)
        body = bytearray()
        async for chunk in response.aiter_stream():
            body += chunk
            if len(body) > self._limits.max_bytes:
                raise too_many_bytes(self._limits.max_bytes)
        return bytes(body)


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """Resolves names itself and connects to the checked address."""

    def __init__(self, reach: Reach, system: Resolve) -> None:
        self._reach = reach
        self._system = system
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        found = await addresses.resolve_allowed(host, port, self._reach, self._system)
        failure: httpcore.ConnectError | httpcore.ConnectTimeout | None = None
        for address in found[:4]:
            try:
                return CheckedStream(
                    await self._inner.connect_tcp(address, port, timeout, local_address, socket_options)
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                failure = exc
        assert failure is not None
        raise failure


class CheckedStream(httpcore.AsyncNetworkStream):
    """Closes itself when a TLS handshake is cancelled. httpcore 1.0 leaves it open, and a server that never
    answers would collect our sockets."""

    def __init__(self, inner: httpcore.AsyncNetworkStream) -> None:
        self._inner = inner

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - the signature is httpcore's
    ) -> httpcore.AsyncNetworkStream:
        try:
            return await self._inner.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._inner.aclose()
            raise

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        return await self._inner.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await self._inner.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


@lru_cache(maxsize=1)  # a tenth of a second
def _ssl_context() -> ssl.SSLContext:
    """The usual authorities, or those of SSL_CERT_FILE and SSL_CERT_DIR."""
    return httpx.create_ssl_context()
