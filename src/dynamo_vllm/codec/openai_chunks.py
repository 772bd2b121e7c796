"""Turns engine outputs into OpenAI stream chunks (text mode)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from dynamo_vllm.codec.chunks import usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.job import ChoiceParser, Output, Position, TokenLogprob
    from dynamo_vllm.wire import Chunk


class TextEncoder:
    """One per request; chat deltas or completion texts."""

    def __init__(
        self,
        job_id: str,
        model: str,
        prompt_tokens: int,
        is_chat: bool,
        parsers: Sequence[ChoiceParser] = (),
    ) -> None:
        self._head: Chunk = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{job_id}",
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._is_chat = is_chat
        self._prompt = prompt_tokens
        self._completion = 0
        self._has_role: set[int] = set()
        self._parsers = parsers
        """One per choice, or none."""
        self._has_tool_calls: set[int] = set()

    def encode(self, output: Output) -> Chunk:
        self._completion += len(output.token_ids)
        choice = self._chat_choice(output) if self._is_chat else self._completion_choice(output)
        choice["index"] = output.index
        has_called = output.finish == "stop" and output.index in self._has_tool_calls
        choice["finish_reason"] = "tool_calls" if has_called else output.finish
        chunk: Chunk = {**self._head, "choices": [choice]}
        if output.finished:
            chunk["usage"] = usage(self._prompt, self._completion, output.cached_tokens)
        return chunk

    def _chat_choice(self, output: Output) -> dict[str, object]:
        delta = self._parse_delta(output) if self._parsers else {"content": output.text or ""}
        if output.index not in self._has_role:
            self._has_role.add(output.index)
            delta["role"] = "assistant"
        choice: dict[str, object] = {"delta": delta}
        if output.logprobs is not None:
            choice["logprobs"] = {"content": [_chat_logprob(p) for p in output.logprobs]}
        return choice

    def _parse_delta(self, output: Output) -> dict[str, object]:
        part = self._parsers[output.index].part(output)
        if part.tool_calls:
            self._has_tool_calls.add(output.index)
        parts = {
            "content": part.content,
            "reasoning_content": part.reasoning,
            "tool_calls": part.tool_calls,
        }
        return {name: value for name, value in parts.items() if value}

    def _completion_choice(self, output: Output) -> dict[str, object]:
        choice: dict[str, object] = {"text": output.text or ""}
        if output.logprobs is not None:
            choice["logprobs"] = _completion_logprobs(output.logprobs)
        return choice


def _chat_logprob(position: Position) -> dict[str, object]:
    return {**_token(position.chosen), "top_logprobs": [_token(c) for c in position.candidates]}


def _token(c: TokenLogprob) -> dict[str, object]:
    text = c.text or ""
    return {"token": text, "logprob": c.logprob, "bytes": list(text.encode())}


def _completion_logprobs(positions: Sequence[Position]) -> dict[str, object]:
    return {
        "tokens": [p.chosen.text or "" for p in positions],
        "token_logprobs": [p.chosen.logprob for p in positions],
        "top_logprobs": [{c.text or "": c.logprob for c in p.candidates} for p in positions],
        "text_offset": [],
    }
