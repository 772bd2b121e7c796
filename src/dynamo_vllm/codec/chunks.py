"""Turns engine outputs into the chunks of the token protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.wire import prompt_mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.job import Output, Position
    from dynamo_vllm.wire import Chunk


class TokenEncoder:
    """One per request: turns outputs into chunks and counts for the usage of the last one.

    The first chunk carries the prompt's length, so that another worker knows it if the request moves.
    """

    __slots__ = ("_completion", "_mark", "_prompt")

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt = prompt_tokens
        self._completion = 0
        self._mark: dict[str, str] | None = prompt_mark(prompt_tokens)

    def encode(self, output: Output) -> Chunk:
        ids = output.token_ids
        self._completion += len(ids)
        chunk: Chunk = {"token_ids": ids, "index": output.index}
        if self._mark is not None:
            chunk["worker_trace_link"], self._mark = self._mark, None
        if output.logprobs is not None:
            chunk["log_probs"] = [position.chosen.logprob for position in output.logprobs]
            chunk["top_logprobs"] = top_logprobs(output.logprobs)
        if output.prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        if output.finish is not None:
            chunk["finish_reason"] = output.finish
            if output.stop_reason is not None:
                chunk["stop_reason"] = output.stop_reason
            if output.finished:
                cached = min(output.cached_tokens or 0, self._prompt)
                chunk["completion_usage"] = usage(self._prompt, self._completion, cached)
        return chunk


def usage(prompt: int, completion: int, cached: int | None) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached or 0},
    }


def top_logprobs(positions: Sequence[Position]) -> list[list[dict[str, object]]]:
    return [
        [
            {"rank": c.rank or 0, "token_id": c.token_id, "token": c.text, "logprob": c.logprob}
            for c in position.candidates
        ]
        for position in positions
    ]


def prompt_logprobs(positions: Sequence[Position | None]) -> list[dict[str, dict[str, object]] | None]:
    """vLLM's form: one object per position, keyed by token id; the first position has none."""
    return [
        None
        if position is None
        else {
            str(c.token_id): {"logprob": c.logprob, "rank": c.rank, "decoded_token": c.text}
            for c in position.candidates
        }
        for position in positions
    ]
