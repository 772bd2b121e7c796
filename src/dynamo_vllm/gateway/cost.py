"""Computes what a request may cost at most, before anybody has counted its tokens.

One function for all ways in: Envoy's fields of a body, the body itself (lines of batches, background
responses), and forms. What a client writes is clamped, so no number of a client moves a counter by more than
`MOST_TOKENS`, and none moves it down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from dynamo_vllm.gateway.replies import GatewayError

MOST_TOKENS = (1 << 31) - 1
BYTES_PER_TOKEN = 3
"""For the tokens of a prompt that nobody has counted yet; English has four, code three."""
DEFAULT_TOKENS = 1024
"""Reserved for the answer of a request without a limit of its own."""
MOST_PROMPT_TOKENS = 32768
"""Reserved for one prompt that may have images in it: the bytes of an image are not its tokens."""
WITHOUT_ANSWER = ("/v1/embeddings", "/v2/embed", "/v1/classify", "/v1/pooling", "/score")
"""Paths, or their ends, whose models write no tokens."""
RERANK = "rerank"
LONGEST_NUMBER = 64
"""Characters; nobody writes a limit of tokens with more."""
_NULL = Raw(b"null")


@dataclass(frozen=True, slots=True)
class Size:
    """What the cost of a request follows from; numbers are the text that the client wrote."""

    body_bytes: int
    token_limits: tuple[str | None, ...] = ()
    """Of the answer; the largest counts, whichever the API reads."""
    answers: tuple[str | None, ...] = ()
    """How many answers to each prompt: `n`, `best_of`."""
    prompts: int = 1
    has_messages: bool = False


class _Body(msgspec.Struct):
    """Raw, so that a field of the wrong type costs no memory."""

    max_tokens: Raw = _NULL
    max_completion_tokens: Raw = _NULL
    max_output_tokens: Raw = _NULL
    n: Raw = _NULL
    best_of: Raw = _NULL
    prompt: Raw = _NULL
    messages: Raw = _NULL


def worst_case(path: str, size: Size) -> int:
    """Return the tokens to reserve for a request to this path."""
    prompts = max(1, size.prompts)
    prompt_tokens = max(0, size.body_bytes) // BYTES_PER_TOKEN
    if size.has_messages or not has_no_answer(path):
        prompt_tokens = min(prompt_tokens, MOST_PROMPT_TOKENS * prompts)
    answer_tokens = 0
    if not has_no_answer(path):
        answers = max((count(number) for number in size.answers), default=0)
        answer_tokens = max((count(number) for number in size.token_limits), default=0) or DEFAULT_TOKENS
        answer_tokens *= max(1, answers) * prompts
    return min(prompt_tokens + answer_tokens, MOST_TOKENS)


def of_body(path: str, body: bytes) -> int:
    """Return the tokens to reserve for a JSON body; raise GatewayError for a body that is none."""
    return worst_case(path, size_of(body))


def size_of(body: bytes) -> Size:
    """Read what the cost of a JSON body follows from; raise GatewayError for a body that is none."""
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise GatewayError(400, f"the body is not a JSON object: {exc}") from None
    limits = (fields.max_tokens, fields.max_completion_tokens, fields.max_output_tokens)
    return Size(
        len(body),
        tuple(map(_text, limits)),
        tuple(map(_text, (fields.n, fields.best_of))),
        prompts_in(bytes(fields.prompt)),
        has_messages=bytes(fields.messages) != b"null",
    )


def prompts_in(prompt: bytes) -> int:
    """Return how many prompts a completion has at most.

    A text with quotes in it counts as several, whose unused tokens come back. Decoding a list of millions of
    items would hold up all other requests.
    """
    inside = prompt.lstrip()[1:].lstrip() if prompt.lstrip().startswith(b"[") else b""
    if inside.startswith(b'"'):
        return inside.count(b'"') // 2
    if inside.startswith(b"["):
        return inside.count(b"[")
    return 1


def has_no_answer(path: str) -> bool:
    return path.endswith(WITHOUT_ANSWER) or path.endswith(RERANK)


def count(number: str | None) -> int:
    """Return a number of a client, from 0 to `MOST_TOKENS`; 0 for what is none."""
    try:
        value = float(number[:LONGEST_NUMBER]) if number else 0.0
    except ValueError:
        return 0
    return 0 if math.isnan(value) else int(max(0.0, min(value, float(MOST_TOKENS))))


def _text(number: Raw) -> str:
    return bytes(memoryview(number)[:LONGEST_NUMBER]).decode("latin-1")
