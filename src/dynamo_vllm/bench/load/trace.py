"""Reads traces in the Mooncake format, and computes the best cache hit rate one worker could reach.

A line is one request: `timestamp` (ms), `input_length`, `output_length`, and one id in `hash_ids` for every
512 tokens of the prompt. Equal ids mean equal text, so each id stands for one random block of token ids.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

BLOCK = 512
"""How many tokens one hash id stands for in a trace file."""


class Line(msgspec.Struct, frozen=True):
    """One line of the file."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of the trace, scaled for sending."""

    at: float
    """Seconds from the start."""
    input_tokens: int
    output_tokens: int
    hash_ids: list[int]
    block: int
    """How many tokens one hash id stands for."""


class Trace(msgspec.Struct, frozen=True):
    """A trace scaled to a model."""

    requests: list[TraceRequest]
    clipped: int = 0
    """Requests shortened to fit the model's context."""


def read(path: Path, limit: int | None = None) -> list[Line]:
    """Read the lines of a trace file and return them in the order of their timestamps."""
    lines = []
    try:
        with path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    lines.append(_line(path, number, text))
                if limit is not None and len(lines) == limit:
                    break
    except OSError as exc:
        raise ConfigError(f"--trace {path} cannot be read: {exc.strerror}") from None
    if not lines:
        raise ConfigError(f"--trace {path} contains no request")
    return sorted(lines, key=lambda line: line.timestamp)


def _line(path: Path, number: int, text: bytes) -> Line:
    try:
        line = msgspec.json.decode(text, type=Line)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"--trace {path}:{number}: {exc}; the Mooncake format is needed") from None
    if line.input_length < 1 or len(line.hash_ids) < -(-line.input_length // BLOCK):
        raise ConfigError(
            f"--trace {path}:{number}: {line.input_length} tokens need one hash id per {BLOCK}; "
            f"the line has {len(line.hash_ids)}"
        )
    return line


def scale(lines: Sequence[Line], *, block: int, speed: float, context: int | None) -> Trace:
    """Scale lengths to blocks of `block` tokens instead of 512, and cut requests to fit the context.

    A prompt is cut at its end, where it has least in common with others.
    """
    start = lines[0].timestamp
    requests, clipped = [], 0
    for line in lines:
        prompt = max(1, -(-line.input_length * block // BLOCK))
        answer = max(1, -(-line.output_length * block // BLOCK))
        kept_answer = min(answer, max(1, context - 1)) if context else answer
        kept = min(prompt, max(1, context - kept_answer)) if context else prompt
        clipped += (kept, kept_answer) != (prompt, answer)
        at = (line.timestamp - start) / 1000 / speed
        requests.append(TraceRequest(at, kept, kept_answer, line.hash_ids, block))
    return Trace(requests, clipped)


def prompt_ids(request: TraceRequest, seed: int, vocab: tuple[int, int]) -> list[int]:
    """Return the token ids of a request. Equal hash ids give equal tokens, in every request and process."""
    ids: list[int] = []
    for hash_id in request.hash_ids:
        if len(ids) >= request.input_tokens:
            break
        ids += block_ids(hash_id, request.block, seed, vocab)
    return ids[: request.input_tokens]


@functools.lru_cache(maxsize=4096)
def block_ids(hash_id: int, block: int, seed: int, vocab: tuple[int, int]) -> list[int]:
    return random.Random(f"{seed}/block/{hash_id}").choices(range(*vocab), k=block)


# --- the best possible hit rate ---------------------------------------------------------------------------


class Ceiling(msgspec.Struct, frozen=True):
    """How many prompt tokens one worker would find in its cache if it served the whole trace in order."""

    prompt_tokens: int
    cached_tokens: int

    @property
    def rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


def ceiling(requests: Iterable[TraceRequest], block_size: int, cache_blocks: int | None = None) -> Ceiling:
    """Return the best hit rate of one worker whose engine caches blocks of `block_size` tokens.

    Without `cache_blocks` the cache is infinite. With it, the least recently used block is evicted first, and
    a prompt's end before its beginning, as in vLLM. Prompts are served one after the other and answers use
    no blocks, so a real worker stays below this rate. As in vLLM, only whole blocks are reused, and never
    a whole prompt: its last token is always computed.
    """
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    chains: dict[tuple[int, int], int] = {}
    tokens = hits = 0
    for request in requests:
        keys = _block_keys(request, block_size, chains)
        found = 0
        for key in keys:
            if key not in cache:
                break
            found += 1
        tokens += request.input_tokens
        hits += min(found, (request.input_tokens - 1) // block_size) * block_size
        for key in reversed(keys):
            cache[key] = None
            cache.move_to_end(key)
        while cache_blocks is not None and len(cache) > cache_blocks:
            cache.popitem(last=False)
    return Ceiling(tokens, hits)


def _block_keys(
    request: TraceRequest, block_size: int, chains: dict[tuple[int, int], int]
) -> list[tuple[int, int]]:
    """Return one key per whole block of the engine; equal keys mean equal text up to the block's end.

    `chains` gives a number to every sequence of hash ids, keyed by its last id and the number of the rest.
    """
    known, chain = [], -1
    for hash_id in request.hash_ids:
        chain = chains.setdefault((chain, hash_id), len(chains))
        known.append(chain)
    whole = request.input_tokens // block_size
    return [(known[((index + 1) * block_size - 1) // request.block], index) for index in range(whole)]
