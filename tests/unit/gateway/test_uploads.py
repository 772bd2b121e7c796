"""Forms with a file: what is bounded while they come."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.requests import Request

from dynamo_vllm.gateway import uploads
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.uploads import Received

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


async def refusal(request: Request, **more: Any) -> int:
    with pytest.raises(GatewayError) as refused:
        await received(request, **more)
    return refused.value.status


async def test_file_and_fields_are_received_in_any_pieces() -> None:
    whole = FILE + b"abc" + b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nm' + END
    sizes: list[int] = []
    received_form, file = await received(
        form(bytes([byte]) for byte in whole), on_bytes=sizes.append, seconds=60.0
    )
    assert (file, received_form.size, received_form.filename, received_form.one("model")) == (
        b"abc",
        3,
        "a.wav",
        "m",
    )
    assert sum(sizes) == len(whole)


@pytest.mark.parametrize("boundary", ["", '""', "b" * 71, "b" * 50_000])
async def test_odd_boundary_is_refused(boundary: str) -> None:
    assert await refusal(form([FILE, END], boundary)) == 400


@pytest.mark.parametrize(
    "endless",
    [b"a", b"X-A: " + b"v" * 60 + b"\r\n", b"X-A: v" * 20 + b"v"],
    ids=["name", "headers", "value"],
)
async def test_headers_of_a_part_are_bounded(endless: bytes) -> None:
    pieces = (b"--x\r\n" if index == 0 else endless for index in range(100_000))
    assert await refusal(form(pieces)) in (400, 413)


@pytest.mark.parametrize(
    "part",
    [b"--x\r\n\r\n\r\n", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nv\r\n'],
    ids=["empty", "field"],
)
async def test_number_of_parts_is_bounded(part: bytes) -> None:
    assert await refusal(form(part for _ in range(100_000))) == 400


@pytest.mark.parametrize(
    ("begin", "endless"),
    [(FILE + b"abc" + END, b"after the end" * 100), (b"\r\n", b"\r\n" * 1000), (FILE, b"\r\n--" * 100)],
    ids=["epilogue", "preamble", "file"],
)
async def test_form_that_never_ends_is_refused(begin: bytes, endless: bytes) -> None:
    pieces = (begin if index == 0 else endless for index in range(1_000_000))
    assert await refusal(form(pieces)) == 413


async def test_form_that_does_not_come_in_time_is_told_so() -> None:
    request = form([FILE, b"abc"], ends=False)
    with pytest.raises(GatewayError, match=r"not complete after 0\.05 s") as refused:
        await received(request, seconds=0.05)
    assert refused.value.status == 408


async def test_client_that_leaves_is_no_failure_of_ours() -> None:
    async def leave() -> Any:
        return {"type": "http.disconnect"}

    request = Request({**form([]).scope}, leave)
    assert await refusal(request) == 499


def test_time_for_a_form_grows_with_its_size() -> None:
    assert uploads.seconds_for(0) == 60
    assert uploads.seconds_for(200 << 20) == 60 + 3200
