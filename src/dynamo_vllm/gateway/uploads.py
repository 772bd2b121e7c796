"""Reads an uploaded file piece by piece from a multipart form and writes it to a file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from dynamo_vllm.gateway.exchange import too_long
from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from starlette.requests import Request

FIELD_BYTES = HEADER_BYTES = 4096
MOST_FIELDS = MOST_HEADERS = 16
"""Beside the file, and of one part."""
FORM_BYTES = 128 << 10
"""What a form may have beside the file."""
BOUNDARY_BYTES = 70
"""RFC 2046, 5.1.1."""
FORM_SECONDS, BYTES_PER_SECOND = 60.0, 64 << 10
"""A form has a minute, and more as long as it comes so fast."""
WRITTEN_TOGETHER = 1 << 20


@dataclass(frozen=True, slots=True)
class Received:
    """A form whose file is written."""

    filename: str
    fields: Mapping[str, Sequence[str]]
    """The other fields; one may be there several times."""
    size: int

    def one(self, name: str) -> str | None:
        """Return a field that is there once; the last one counts."""
        found = self.fields.get(name)
        return found[-1] if found else None


class _Form:
    """Receives what the parser finds: the file's pieces and the small fields."""

    def __init__(self) -> None:
        self.fields: dict[str, list[bytes]] = {}
        self._parts = 0
        self._headers_of_part = 0
        self.filename: str | None = None
        self.pieces: list[bytes] = []
        self._header_name = b""
        self._header_value = b""
        self._disposition = b""
        self._field: str | None = None

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_part_data": self._data,
            "on_header_field": self._name,
            "on_header_value": self._value,
            "on_header_end": self._header,
            "on_headers_finished": self._headers,
        }

    def taken(self) -> bytes:
        """Return what came since the last time."""
        found, self.pieces = b"".join(self.pieces), []
        return found

    def _begin(self) -> None:
        self._disposition = b""
        self._headers_of_part = 0
        self._parts += 1
        if self._parts > MOST_FIELDS + 1:
            raise GatewayError(400, f"the form has more than {MOST_FIELDS} fields")

    def _name(self, data: bytes, start: int, end: int) -> None:
        self._header_name += data[start:end]
        self._refuse_long_header()

    def _value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]
        self._refuse_long_header()

    def _refuse_long_header(self) -> None:
        if len(self._header_name) + len(self._header_value) > HEADER_BYTES:
            raise GatewayError(400, f"a header of the form is longer than {HEADER_BYTES} bytes")

    def _header(self) -> None:
        self._headers_of_part += 1
        if self._headers_of_part > MOST_HEADERS:
            raise GatewayError(400, f"a part of the form has more than {MOST_HEADERS} headers")
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode(errors="replace")
        self._field = name
        if name == "file":
            if self.filename is not None:
                raise GatewayError(400, "the form has two files", parameter="file")
            self.filename = options.get(b"filename", b"file").decode(errors="replace")[:255]
        else:
            self.fields.setdefault(name, []).append(b"")

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._field == "file":
            self.pieces.append(data[start:end])
        elif self._field is not None:
            values = self.fields[self._field]
            values[-1] += data[start:end]
            if len(values[-1]) > FIELD_BYTES:
                raise GatewayError(400, f"the field {self._field!r} is too long", parameter=self._field)


def seconds_for(size: int) -> float:
    """Return how long a form of so many bytes may take."""
    return FORM_SECONDS + size / BYTES_PER_SECOND


async def receive(
    request: Request,
    target: BinaryIO,
    limit: int,
    needed: str,
    *,
    seconds: float | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Received:
    """Write the file of a form to `target`; `needed` names the fields that the form must have.

    `on_bytes` is called with the size of each piece before it is read; it may raise GatewayError.
    """
    form = _Form()
    parser = _parser(request, form, needed)
    try:
        async with asyncio.timeout(seconds):
            size = await _read(request, parser, form, target, limit, on_bytes)
    except FormParserError as exc:
        raise GatewayError(400, f"the form is broken: {exc}") from None
    except TimeoutError:
        message = f"the form was not complete after {seconds:g} s; send it again, faster"
        raise GatewayError(408, message) from None
    except ClientDisconnect:
        raise GatewayError(499, "the client left before the form was complete") from None
    if form.filename is None:
        raise GatewayError(400, "the form has no file", parameter="file")
    fields = {name: [one.decode(errors="replace") for one in all_] for name, all_ in form.fields.items()}
    return Received(form.filename, fields, size)


def _parser(request: Request, form: _Form, needed: str) -> MultipartParser:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or b"boundary" not in options:
        raise GatewayError(400, f"send a form (multipart/form-data) with {needed}")
    boundary = options[b"boundary"]
    if not 0 < len(boundary) <= BOUNDARY_BYTES:
        raise GatewayError(400, f"the boundary of a form has 1 to {BOUNDARY_BYTES} characters")
    return MultipartParser(boundary, form.callbacks())


async def _read(
    request: Request,
    parser: MultipartParser,
    form: _Form,
    target: BinaryIO,
    limit: int,
    on_bytes: Callable[[int], None] | None,
) -> int:
    """Return the size of the file."""
    total, size, waiting = 0, 0, 0
    async for chunk in request.stream():
        total += len(chunk)
        if total > limit + FORM_BYTES:
            raise too_long(limit)
        if on_bytes is not None:
            on_bytes(len(chunk))
        parser.write(chunk)
        waiting += len(chunk)
        if waiting >= WRITTEN_TOGETHER:
            size, waiting = size + await _write(target, form.taken(), limit, size), 0
    parser.finalize()
    return size + await _write(target, form.taken(), limit, size)


async def _write(target: BinaryIO, data: bytes, limit: int, written: int) -> int:
    if len(data) > limit - written:
        raise too_long(limit)
    return await asyncio.to_thread(target.write, data)
