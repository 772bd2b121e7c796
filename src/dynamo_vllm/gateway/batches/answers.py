"""Makes the lines of the output and of the errors, and counts their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dynamo_vllm.gateway.batches.lines import UNREADABLE, Fault
from dynamo_vllm.gateway.replies import GatewayError

NO_TOKENS = (0, 0, 0, 0)


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    """Of chats and completions, or of responses."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None

    def tokens(self) -> tuple[int, int, int, int]:
        prompt = self.prompt_tokens_details or self.input_tokens_details or _Details()
        completion = self.completion_tokens_details or self.output_tokens_details or _Details()
        return (
            self.prompt_tokens or self.input_tokens or 0,
            prompt.cached_tokens or 0,
            self.completion_tokens or self.output_tokens or 0,
            completion.reasoning_tokens or 0,
        )


class _Used(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The answer to a line, before it is on the disk."""

    number: int
    text: bytes
    is_error: bool
    tokens: tuple[int, int, int, int]
    """Of the prompt, of it cached, of the answer, of it thoughts."""


def good(number: int, request_id: str, custom_id: str | None, body: bytes) -> LineAnswer:
    """Return the line of an answer; raise GatewayError for one that nobody can read."""
    try:
        tokens = _tokens(body)
        if b"\n" in body:
            body = msgspec.json.encode(msgspec.json.decode(body))
    except UNREADABLE:
        raise GatewayError(502, "the answer of the frontend cannot be read", code="invalid_answer") from None
    return LineAnswer(number, _line(request_id, custom_id, 200, body), False, tokens)


def bad(number: int, request_id: str, custom_id: str | None, error: GatewayError) -> LineAnswer:
    text = _line(request_id, custom_id, error.status, error.body())
    return LineAnswer(number, text, True, NO_TOKENS)


def unanswered(batch_id: str, error: GatewayError | Fault, number: int, custom_id: str | None) -> bytes:
    """Return the line of a request that was not sent: with the answer that it would have had, or a reason."""
    request_id = request_id_of(batch_id, number)
    if isinstance(error, GatewayError):
        return bad(number, request_id, custom_id, error).text
    reason = {"code": error.code, "message": error.message}
    return _encoded(request_id, custom_id, None, reason)


def request_id_of(batch_id: str, number: int) -> str:
    """Return the name of a line in the ledger; it has the same one whenever it is sent."""
    return f"{batch_id}-{number}"


def _line(request_id: str, custom_id: str | None, status: int, body: bytes) -> bytes:
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)}
    return _encoded(request_id, custom_id, response, None)


def _encoded(
    request_id: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None
) -> bytes:
    name = f"batch_req_{request_id.removeprefix('batch_')}"
    line = {"id": name, "custom_id": custom_id, "response": response, "error": error}
    return msgspec.json.encode(line) + b"\n"


def _tokens(answer: bytes) -> tuple[int, int, int, int]:
    try:
        usage = msgspec.json.decode(answer, type=_Used).usage
    except msgspec.ValidationError:
        return NO_TOKENS
    return NO_TOKENS if usage is None else usage.tokens()
