"""Runs a forward proxy on loopback, through which the frontend fetches images.

The Rust frontend (1.6.1) fetches the first 4 KB of each image URL, to count its tokens for routing, before a
worker has checked the URL. It applies a list of hosts only when it decodes images itself, and treats some
private addresses as public. It obeys ALL_PROXY, so its requests go through here and follow the same rules as
those of a worker. Without an image's size it routes by text alone. Files of a model card, which it fetches
from a worker at an address from discovery, go through here too, and so do its exports (spans, log lines and
records of ended requests): NO_PROXY knows no ports, so a receiver's address there would open all of its
machine to images.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import ipaddress
import logging
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.fetch import addresses
from dynamo_vllm.media.fetch.addresses import Reach

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping

    from dynamo_vllm.media.fetch.addresses import Resolve

logger = logging.getLogger(__name__)

HEAD_SECONDS = 10.0
"""For the head of a request, and for connecting to the host."""
IDLE_SECONDS = 60.0
MAX_IMAGES = 256
"""Concurrent requests. Files of model cards are not counted: without them no new model is served."""
MAX_EXPORT_BYTES = 16 << 20
"""The largest batch of spans or records."""
PROXIES = ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
_ENDPOINTS = (
    "HF_ENDPOINT",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "KUBERNETES_SERVICE_HOST",
)
"""Other hosts that the frontend's process may reach over HTTP; they belong to the operator."""
_HOP_HEADERS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"proxy-authorization", b"te"))
_ANYWHERE = Reach(networks=(ipaddress.ip_network("0.0.0.0/0"), ipaddress.ip_network("::/0")))
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
_BROKEN_OFF = (ConnectionError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)


class Proxy:
    """Listens from the beginning, so that its address can be put into the environment; `run` answers."""

    def __init__(self, reach: Reach, exports: Collection[str] = ()) -> None:
        """`exports` are the addresses to which the frontend sends spans, log lines and records."""
        self._reach = reach
        self._exports = {place(url) for url in exports if urlsplit(url).scheme == "http"}
        self._tls_hosts = {urlsplit(url).hostname for url in exports if urlsplit(url).scheme == "https"}
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._password = secrets.token_urlsafe(16)
        """Other users of this machine must not send requests in the frontend's name."""
        # Separate, so that slow names of images do not delay model cards.
        self._threads = ThreadPoolExecutor(4, "media-names"), ThreadPoolExecutor(1, "card-names")
        self._resolve, self._resolve_for_cards = map(addresses.system_resolver, self._threads)
        self._open: set[asyncio.Task[None]] = set()
        self._images = 0

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that make the frontend use it; none if the operator has a proxy, which then
        decides."""
        if any(environment.get(name) for name in PROXIES):
            return {}
        # HTTP_PROXY and HTTPS_PROXY would break the runtime's Kubernetes client, which does not support
        # proxies.
        url = f"http://media:{self._password}@127.0.0.1:{self._socket.getsockname()[1]}"
        hosts = no_proxy_hosts(environment, (host for host in self._tls_hosts if host))
        return {"ALL_PROXY": url, **dict.fromkeys(("NO_PROXY", "no_proxy"), hosts)}

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, sock=self._socket)
        try:
            yield
        finally:
            server.close()
            for task in self._open:
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)
            for threads in self._threads:
                threads.shutdown(wait=False, cancel_futures=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(*_BROKEN_OFF), contextlib.ExitStack() as held:
            try:
                async with asyncio.timeout(HEAD_SECONDS):
                    request, connection = await read_head(reader)
                    self._check_password(request)
                    is_export = self._is_export(request)
                    host, port, head = target(request, allow_post=is_export)
                    if is_export:
                        head += await read_body(connection, reader)
                        there = await asyncio.open_connection(host, port)
                    elif is_for_model_card(request):
                        there = await connect(host, port, _ANYWHERE, self._resolve_for_cards)
                    else:
                        held.enter_context(self._image_slot())
                        there = await connect(host, port, self._reach, self._resolve)
            except (MediaRefused, h11.RemoteProtocolError) as exc:
                logger.info("media: refused an image request of the frontend: %s", exc)
                writer.write(_answer(403, str(exc)))
            except (OSError, TimeoutError) as exc:
                writer.write(_answer(502, f"the host cannot be reached: {exc}"))
            else:
                with contextlib.closing(there[1]):
                    await _relay(head, (reader, writer), there)
            await writer.drain()

    def _is_export(self, request: h11.Request) -> bool:
        try:
            return request.method == b"POST" and place(request.target.decode()) in self._exports
        except ValueError:
            return False

    @contextlib.contextmanager
    def _image_slot(self) -> Iterator[None]:
        """Connect for an image."""
        if self._images >= MAX_IMAGES:
            raise MediaRefused("too many images are fetched at once")
        self._images += 1
        try:
            yield
        finally:
            self._images -= 1

    def _check_password(self, request: h11.Request) -> None:
        expected = b"Basic " + base64.b64encode(f"media:{self._password}".encode())
        given = dict(request.headers).get(b"proxy-authorization", b"")
        if not secrets.compare_digest(given, expected):
            raise MediaRefused("this proxy is only for the frontend")


async def connect(host: str, port: int, reach: Reach, resolve: Resolve) -> Streams:
    """Connect to the checked address."""
    reach.check_name(host)
    failure = OSError("no address")
    for address in (await addresses.resolve_allowed(host, port, reach, resolve))[:4]:
        try:
            return await asyncio.open_connection(address, port)
        except OSError as exc:
            failure = exc
    raise failure


def place(url: str) -> tuple[str | None, int, str, str]:
    """Return what two writings of the same address have in common; raise ValueError for a bad port."""
    parts = urlsplit(url)
    return parts.hostname, parts.port or 80, parts.path, parts.query


def no_proxy_hosts(environment: Mapping[str, str], more: Iterable[str] = ()) -> str:
    """For NO_PROXY: hosts that the frontend uses for other things than images."""
    own = [environment.get(name, "") for name in _ENDPOINTS]
    named = [urlsplit(value if "//" in value else f"//{value}").hostname for value in own]
    given = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    hub = [] if environment.get("HF_ENDPOINT") else ["huggingface.co", ".hf.co"]
    return ",".join(
        dict.fromkeys(name for name in (*given.split(","), "localhost", *hub, *named, *more) if name)
    )


async def read_head(reader: asyncio.StreamReader) -> tuple[h11.Request, h11.Connection]:
    connection = h11.Connection(h11.SERVER)
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            return event, connection
        if event is not h11.NEED_DATA:
            raise h11.RemoteProtocolError("this is not a request")
        connection.receive_data(await reader.read(4096))


async def read_body(connection: h11.Connection, reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            body += event.data
        elif event is h11.NEED_DATA:
            connection.receive_data(await reader.read(1 << 16))
        if len(body) > MAX_EXPORT_BYTES or not (isinstance(event, h11.Data) or event is h11.NEED_DATA):
            raise h11.RemoteProtocolError("this is not an export")
    return bytes(body)


def is_for_model_card(request: h11.Request) -> bool:
    """No image URL can be one: the media fetcher sends its own name."""
    path = urlsplit(request.target).path
    return path.startswith(b"/v1/metadata/") and b"user-agent" not in dict(request.headers)


def target(request: h11.Request, allow_post: bool = False) -> tuple[str, int, bytes]:
    """Return the target and the request for it; no request if the client speaks TLS through the tunnel."""
    methods = (b"GET", b"HEAD", b"POST") if allow_post else (b"GET", b"HEAD")
    is_tunnel = request.method == b"CONNECT"
    text = request.target.decode("ascii", "replace")
    try:
        url = urlsplit(f"//{text}" if is_tunnel else text)
        host, port = url.hostname, url.port
    except ValueError:
        raise h11.RemoteProtocolError("this is not a URL") from None
    if not host or (not is_tunnel and (url.scheme != "http" or request.method not in methods)):
        raise h11.RemoteProtocolError("this proxy only fetches images")
    if is_tunnel:
        return host, port or 443, b""
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    kept = [name + b": " + value for name, value in request.headers if name not in _HOP_HEADERS]
    lines = [request.method + b" " + path.encode() + b" HTTP/1.1", *kept, b"Connection: close", b"", b""]
    return host, port or 80, b"\r\n".join(lines)


async def _relay(head: bytes, here: Streams, there: Streams) -> None:
    """A tunnel goes both ways. A plain connection has one request: the next may be for another host."""
    ways = [(there[0], here[1])]
    if head:
        there[1].write(head)
        async with asyncio.timeout(IDLE_SECONDS):
            here[1].write(with_connection_close(await there[0].readuntil(b"\r\n\r\n")))
    else:
        here[1].write(b"HTTP/1.1 200 Connected\r\n\r\n")
        ways.append((here[0], there[1]))
    copies = [asyncio.ensure_future(_copy(*way)) for way in ways]
    try:
        await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for copy in copies:
            copy.cancel()
        await asyncio.gather(*copies, return_exceptions=True)


def with_connection_close(head: bytes) -> bytes:
    """Return the head of an answer after which the connection is closed."""
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in _HOP_HEADERS]
    return b"\r\n".join([first, *kept, b"Connection: close", b"", b""])


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        async with asyncio.timeout(IDLE_SECONDS):
            data = await reader.read(1 << 16)
            if not data:
                return
            writer.write(data)
            await writer.drain()


def _answer(status: int, text: str) -> bytes:
    body = text.encode()
    head = f"HTTP/1.1 {status} Refused\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body
