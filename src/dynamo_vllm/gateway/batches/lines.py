"""Reads the lines of a batch's file, and checks them before the first is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from msgspec import Raw

from dynamo_vllm.gateway.body_parts import MOST_PARTS, has_many_parts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

OF_FRONTEND = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
OF_WORKERS = ("/v1/rerank", "/v1/score")
"""Which workers answer without the frontend."""
ENDPOINTS = (*OF_FRONTEND, *OF_WORKERS)
MOST_ERRORS = 50
LINE_BYTES = 45 << 20
CUSTOM_ID_CHARACTERS = 512
SHOWN_CHARACTERS = 64
"""Of a client's text in an error."""
EMPTY_LINES = 10
"""For each request that a file may have; the check of a longer file would hold up other work."""
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What reading a client's JSON raises."""


class _Body(msgspec.Struct):
    model: str
    stream: bool | None = None
    background: bool | None = None
    previous_response_id: Any = None
    conversation: Any = None


class _Checked(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: _Body


class Line(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    body: Raw


class Fault(msgspec.Struct):
    """What is wrong with a line, in OpenAI's shape."""

    code: str
    message: str
    line: int | None
    param: str | None = None


def numbered(file: BinaryIO, most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that say something, with their numbers from 1, and the first after `most`."""
    number = 0
    while line := file.readline(LINE_BYTES + 2):
        number += 1
        if line.strip() or (most is not None and number > most):
            yield number, line


def check(path: Path, endpoint: str, most_lines: int) -> tuple[int, list[Fault]]:
    """Return the number of requests, and what is wrong with the file."""
    faults: list[Fault] = []
    seen: set[str] = set()
    total = 0
    with path.open("rb") as file:
        for number, line in numbered(file, EMPTY_LINES * most_lines):
            if number > EMPTY_LINES * most_lines:
                faults.append(Fault("too_many_lines", f"there are more than {number - 1} lines", number))
                break
            total += 1
            if total > most_lines:
                faults.append(Fault("too_many_requests", f"there are more than {most_lines} lines", number))
                break
            found = _checked(line, number, endpoint, seen)
            if found is not None:
                faults.append(found)
                if len(faults) >= MOST_ERRORS:
                    break
    if total == 0 and not faults:
        faults.append(Fault("empty_file", "the file has no requests", None))
    return total, faults


def request_of(line: bytes, endpoint: str) -> tuple[str, bytes]:
    """Return the custom id of a checked line and the body that the frontend gets."""
    found = msgspec.json.decode(line, type=Line)
    if endpoint != "/v1/responses":
        return found.custom_id, bytes(found.body)
    body = msgspec.json.decode(found.body, type=dict[str, Raw])  # nothing of a batch is kept as a response
    body.pop("background", None)
    return found.custom_id, msgspec.json.encode(body | {"store": Raw(b"false")})


def custom_id_of(line: bytes) -> str | None:
    """Return the custom id of a line that perhaps nobody can read."""
    try:
        return msgspec.json.decode(line, type=Line).custom_id
    except UNREADABLE:
        return None


def _checked(line: bytes, number: int, endpoint: str, seen: set[str]) -> Fault | None:
    if len(line) > LINE_BYTES:
        return Fault("line_too_long", f"a line has at most {LINE_BYTES} bytes", number)
    if has_many_parts(line):
        message = f"a line has at most {MOST_PARTS} commas and escaped characters"
        return Fault("too_many_values", message, number)
    try:
        found = msgspec.json.decode(line, type=_Checked)
        line.decode()
    except msgspec.ValidationError as exc:
        return Fault("invalid_request", str(exc), number)
    except RecursionError:
        return Fault("invalid_json_line", "this line is nested too deeply", number)
    except UNREADABLE as exc:
        return Fault("invalid_json_line", f"this line is not JSON: {exc}", number)
    if not 0 < len(found.custom_id) <= CUSTOM_ID_CHARACTERS:
        return Fault("invalid_custom_id", "custom_id is empty or too long", number, "custom_id")
    if found.custom_id in seen:
        name = found.custom_id[:SHOWN_CHARACTERS]
        return Fault("duplicate_custom_id", f"{name!r} is there more than once", number, "custom_id")
    seen.add(found.custom_id)
    if found.method != "POST":
        return Fault("invalid_method", "method is POST", number, "method")
    if found.url != endpoint:
        return Fault("mismatched_endpoint", f"url is {endpoint}, as in the batch", number, "url")
    return _of_body(found.body, number)


def _of_body(body: _Body, number: int) -> Fault | None:
    if body.stream:
        return Fault("stream_not_supported", "a batch does not stream", number, "body.stream")
    if body.background:
        return Fault("background_not_supported", "a batch runs in the background", number, "body.background")
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            return Fault("history_not_supported", f"a batch has no {name}", number, f"body.{name}")
    return None
