"""A web server on loopback that behaves as badly as a test asks."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class BadServer:
    port: int = 0
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[bytes] = field(default_factory=list)
    """Heads, as they came."""
    peers_gone: list[str] = field(default_factory=list)
    """Paths whose client left before the end."""

    def url(self, path: str, host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def serve(self, path: str, answer: Answer) -> str:
        self.answers[path] = answer
        return self.url(path)

    def file(self, path: str, body: bytes, *headers: str) -> str:
        return self.serve(path, whole(body, *headers))

    def redirect(self, path: str, to: str, status: int = 302) -> str:
        return self.serve(path, head(f"{status} Found", f"Location: {to}", "Content-Length: 0"))

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = ""
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                self.requests.append(request)
                path = request.split(b" ", 2)[1].decode()
                await self.answers[path](writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.peers_gone.append(path)
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def bad_server(certificate: Path | None = None) -> AsyncIterator[BadServer]:
    """Speaks TLS with a certificate."""
    made = BadServer()
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(made._handle(reader, writer))
        handlers.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await task

    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=context)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def make_certificate(folder: Path, name: str) -> Path:
    """Of `name`, signed by itself, with its key in the same file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "certificate.pem"
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(secret + made.public_bytes(pem))
    return path


def head(status: str, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write("\r\n".join((f"HTTP/1.1 {status}", *headers, "", "")).encode())

    return answer


def whole(body: bytes, *headers: str) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {len(body)}", *headers)(writer)
        writer.write(body)

    return answer


def chunked(chunk: bytes, count: int | None = None, pause: float = 0.0) -> Answer:
    """`count` chunks, or chunks without end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", "Transfer-Encoding: chunked")(writer)
        sent = 0
        while count is None or sent < count:
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
            await asyncio.sleep(pause)
            sent += 1
        writer.write(b"0\r\n\r\n")

    return answer


def drip(body: bytes, pause: float) -> Answer:
    """Announced in full, sent byte by byte."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {len(body)}")(writer)
        for byte in body:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(pause)

    return answer


def cut(body: bytes, announced: int) -> Answer:
    """Breaks off before the announced end."""

    async def answer(writer: asyncio.StreamWriter) -> None:
        await head("200 OK", f"Content-Length: {announced}")(writer)
        writer.write(body)
        await writer.drain()
        writer.close()

    return answer


async def silent(writer: asyncio.StreamWriter) -> None:
    """Takes the request and says nothing."""
    await asyncio.Event().wait()
