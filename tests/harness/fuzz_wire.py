"""Requests as bytes for a fuzz test: bodies with headers that fit and that do not, and what came back."""

from __future__ import annotations

import functools
import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

SECONDS = 120.0
"""Within which every answer has ended: bounds a hang, nothing else."""


@dataclass(frozen=True, repr=False)
class Asked:
    """One request as it goes over the wire."""

    path: str
    body: bytes
    method: str = "POST"
    headers: tuple[tuple[str, str], ...] = (("content-type", "application/json"),)
    chunked: bool = False
    leave_after: int | None = None
    """The client goes after so many bytes of the answer."""
    ends_early: bool = False
    """It says no more after its bytes, also where its headers promised some."""

    def __repr__(self) -> str:
        """Without most of a long body, which the seed gives again."""
        body = self.body if len(self.body) < 3000 else self.body[:3000] + b"... of %d" % len(self.body)
        headers = [(name, value[:200]) for name, value in self.headers]
        told = f"{self.method} {self.path} {headers} {body!r}"
        return f"{told} chunked={self.chunked} leave_after={self.leave_after} ends_early={self.ends_early}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which writes dataclasses out itself."""
        printer.text(repr(self))

    @property
    def raw(self) -> bytes:
        lines = [f"{self.method} {self.path} HTTP/1.1", "host: 127.0.0.1", "connection: close"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        body = self.body
        if self.chunked:
            lines.append("transfer-encoding: chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in _parts(body)) + b"0\r\n\r\n"
        elif "content-length" not in dict(self.headers):
            lines.append(f"content-length: {len(body)}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + body


def _parts(body: bytes) -> Iterator[bytes]:
    step = max(1, len(body) // 3)
    return (body[at : at + step] for at in range(0, len(body), step))


@dataclass(frozen=True)
class Answer:
    """What came back; status 0 where the connection was closed without a word."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_whole: bool = True
    """False where it broke off: we left before its end, or the server did not want the rest of a body."""

    @property
    def errors(self) -> list[int]:
        """The codes of errors in a stream that had begun with a 200."""
        found = []
        for line in self.body.split(b"\n"):
            if line.startswith(b'data: {"error"'):
                error = json.loads(line[6:])["error"]
                found.append(int(error.get("code") or 500) if isinstance(error, dict) else 500)
        return found


def ask(address: tuple[str, int], asked: Asked) -> Answer:
    """Sends the bytes and reads to the end, or until it is to leave."""
    read = bytearray()
    with socket.create_connection(address, timeout=SECONDS) as connection:
        try:
            connection.sendall(asked.raw)
            if asked.ends_early:
                connection.shutdown(socket.SHUT_WR)
            while asked.leave_after is None or len(read) < asked.leave_after:
                if not (more := connection.recv(1 << 20)):
                    return _parsed(read)
                read += more
        except OSError as exc:
            if isinstance(exc, TimeoutError):
                raise
            # A server that refuses does not read the rest, and its answer may be lost with that.
    return Answer(_parsed(read).status, is_whole=False)


def _parsed(read: bytes | bytearray) -> Answer:
    head, _, body = bytes(read).partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    if not first:
        return Answer(0)
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    if "chunked" in headers.get("transfer-encoding", ""):
        body = b"".join(_unchunked(body))
    return Answer(int(first.split(" ")[1]), headers, body)


def _unchunked(body: bytes) -> Iterator[bytes]:
    at = 0
    while (end := body.find(b"\r\n", at)) >= 0:
        length = int(body[at:end], 16)
        yield body[end + 2 : end + 2 + length]
        at = end + 2 + length + 2


@functools.cache
def bomb(megabytes: int) -> bytes:
    return gzip.compress(b'{"model": "tiny", "prompt": "' + b"a" * (megabytes << 20) + b'"}')


TYPES = ["application/json; charset=utf-16", "text/plain", "multipart/form-data; boundary=a", "", "a" * 9000]
HEADERS = st.lists(
    st.tuples(
        st.sampled_from(
            [
                *("x-request-id", "x-dynamo-request-id", "x-tenant-id", "x-dynamo-meta-a", "traceparent"),
                *("authorization", "accept", "expect", "x-worker-instance-id", "x-dp-rank", "cookie"),
            ]
        ),
        st.sampled_from(
            ["", "a", "-1", "1" * 30, "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é", "a" * 3000]
        ),
    ),
    max_size=2,
)


@st.composite
def requests(draw: st.DrawFn, path: str, bodies: st.SearchStrategy[bytes]) -> Asked:
    """A body sent as it should be, mostly; and as no client should."""
    body, headers = draw(bodies), (("content-type", "application/json"), *draw(HEADERS))
    leave_after = draw(st.sampled_from([None] * 6 + [0, 1, 200, 2000]))
    match draw(st.sampled_from(["plainly"] * 30 + ["type", "gzip", "length", "lengths", "both", "chunked"])):
        case "type":
            headers = (("content-type", draw(st.sampled_from(TYPES))),)
        case "gzip":
            packed = draw(
                st.sampled_from([gzip.compress(body), bomb(64), gzip.compress(body)[:-4], b"\x1f\x8b"])
            )
            coding = draw(st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, gzip", "no such"]))
            return Asked(path, packed, headers=(*headers, ("content-encoding", coding)))
        case "length":
            wrong = draw(
                st.sampled_from([len(body) + 5, max(len(body) - 5, 0), 0, 10**12, -1, 10**30, "1" * 5000])
            )
            return Asked(path, body, headers=(*headers, ("content-length", str(wrong))), ends_early=True)
        case "lengths":
            lengths = (("content-length", str(len(body))), ("content-length", str(len(body) + 1)))
            return Asked(path, body, headers=(*headers, *lengths), ends_early=True)
        case "both":
            return Asked(
                path, body, headers=(*headers, ("content-length", "3")), chunked=True, ends_early=True
            )
        case "chunked":
            return Asked(path, body, headers=headers, chunked=True, leave_after=leave_after)
    return Asked(path, body, headers=headers, leave_after=leave_after)
