"""From engine outputs to the chunks of the token protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dynamo_vllm.job import Output, Position
    from dynamo_vllm.wire import Chunk

FINISH = {"abort": "cancelled"}
"""Our finish words where they differ from the protocol's."""


class TokenEncoder:
    """One per request: turns outputs into chunks and counts for the usage of the last one."""

    __slots__ = ("_completion", "_prompt", "_report_usage")

    def __init__(self, prompt_tokens: int, report_usage: Callable[[], bool] = lambda: True) -> None:
        """`report_usage` is asked at the end: a request that moved here must not count its answer."""
        self._prompt = prompt_tokens
        self._completion = 0
        self._report_usage = report_usage

    def encode(self, output: Output) -> Chunk:
        ids = output.token_ids
        self._completion += len(ids)
        chunk: Chunk = {"token_ids": ids, "index": output.index}
        if output.logprobs is not None:
            chunk["log_probs"] = [position.chosen.logprob for position in output.logprobs]
            chunk["top_logprobs"] = top_logprobs(output.logprobs)
        if output.prompt_logprobs is not None:
            chunk["engine_data"] = {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
        if output.finish is not None:
            chunk["finish_reason"] = FINISH.get(output.finish, output.finish)
            if output.stop_reason is not None:
                chunk["stop_reason"] = output.stop_reason
            if output.finished and self._report_usage():
                chunk["completion_usage"] = usage(self._prompt, self._completion, output.cached_tokens)
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
    """vLLM's shape: one object per position, keyed by token id; the first position has none."""
    return [
        None
        if position is None
        else {
            str(c.token_id): {"logprob": c.logprob, "rank": c.rank, "decoded_token": c.text}
            for c in position.candidates
        }
        for position in positions
    ]
