"""Forms with a file: what is bounded while they come."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import Request

from dynamo_vllm.gateway import uploads
from dynamo_vllm.gateway.uploads import Received
from harness.refusals import refused

LIMIT = 1000
FILE = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
END = b"\r\n--x--\r\n"


def form(chunks: Iterable[bytes], boundary: str = "x", *, ends: bool = True) -> Request:
    """Return a request whose body comes in these pieces; one that does not end is waited for."""
    pieces = iter(chunks)

    async def come() -> Any:
        piece = next(pieces, None)
        if piece is None and not ends:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    content_type = f"multipart/form-data; boundary={boundary}".encode()
    return Request({"type": "http", "method": "POST", "headers": [(b"content-type", content_type)]}, come)


async def received(request: Request, **more: Any) -> tuple[Received, bytes]:
    target = io.BytesIO()
    async with asyncio.timeout(60):
        return await uploads.receive(request, target, LIMIT, "file and model", **more), target.getvalue()


async def test_file_and_fields_are_received_in_any_pieces() -> None:
    whole = FILE + b"abc" + b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm' + END
    sizes: list[int] = []
    pieces = form(bytes([byte]) for byte in whole)
    fields, file = await received(pieces, on_bytes=sizes.append, seconds=60.0)
    assert (file, fields.size, fields.filename, fields.one("model")) == (b"abc", 3, "a.wav", "m")
    assert sum(sizes) == len(whole)


async def test_odd_boundary_is_refused() -> None:
    for boundary in ("", '""', "b" * 71, "b" * 50_000):
        with refused(400):
            await received(form([FILE, END], boundary))


FIELD = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n'


@pytest.mark.parametrize(
    ("begin", "endless", "status"),
    [
        pytest.param(b"--x\r\n", b"a", 400, id="name of a header"),
        pytest.param(b"--x\r\n", b"X-A: " + b"v" * 60 + b"\r\n", 400, id="headers"),
        pytest.param(b"--x\r\n", b"X-A: v" * 20 + b"v", 400, id="value of a header"),
        pytest.param(b"", b"--x\r\n\r\n\r\n", 400, id="empty parts"),
        pytest.param(b"", FIELD, 400, id="fields"),
        pytest.param(FILE + b"abc" + END, b"after the end" * 100, 413, id="epilogue"),
        pytest.param(b"\r\n", b"\r\n" * 1000, 413, id="preamble"),
        pytest.param(FILE, b"\r\n--" * 100, 413, id="file"),
    ],
)
async def test_form_that_never_ends_is_refused(begin: bytes, endless: bytes, status: int) -> None:
    with refused(status):
        await received(form(begin if index == 0 else endless for index in range(1_000_000)))


async def test_form_that_does_not_come_in_time_is_told_so() -> None:
    with refused(408, "not complete after 0.05 s"):
        await received(form([FILE, b"abc"], ends=False), seconds=0.05)


async def test_client_that_leaves_is_no_failure_of_ours() -> None:
    async def leave() -> Any:
        return {"type": "http.disconnect"}

    with refused(499):
        await received(Request({**form([]).scope}, leave))


def test_time_for_a_form_grows_with_its_size() -> None:
    assert uploads.seconds_for(0) == 60
    assert uploads.seconds_for(200 << 20) == 60 + 3200
