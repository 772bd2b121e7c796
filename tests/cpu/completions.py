"""Asks for completions, and reads what a client sees of them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from harness.stack import Stack

PATH = "/v1/completions"


@dataclass(frozen=True)
class Completion:
    answer: dict[str, Any]

    @property
    def text(self) -> str:
        return str(self.answer["choices"][0]["text"])

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.answer["choices"]]

    @property
    def finishes(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.answer["choices"]]

    @property
    def prompt_tokens(self) -> int:
        return int(self.answer["usage"]["prompt_tokens"])

    @property
    def tokens(self) -> int:
        return int(self.answer["usage"]["completion_tokens"])

    @property
    def cached(self) -> int:
        """Tokens of the prompt that the engine had cached; of two engines, the first."""
        return int((self.answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def worker(self) -> int:
        return int(self.answer["nvext"]["worker_id"]["decode_worker_id"])

    @property
    def prefill_worker(self) -> int | None:
        worker: int | None = self.answer["nvext"]["worker_id"].get("prefill_worker_id")
        return worker

    def rank(self, role: str = "decode") -> int:
        return int(self.answer["nvext"]["worker_id"][f"{role}_dp_rank"])

    @property
    def hit_rate(self) -> float:
        """What the router took for cached."""
        return float(self.answer["nvext"]["timing"].get("kv_hit_rate") or 0)

    @property
    def not_computed(self) -> int:
        """Tokens of the prompt that the decode engine did not compute."""
        return int(self.answer["nvext"]["engine_data"]["decode_cached_tokens"])

    @property
    def prompt_logprobs(self) -> list[dict[str, Any] | None]:
        logprobs: list[dict[str, Any] | None] = self.answer["nvext"]["engine_data"]["prompt_logprobs"]
        return logprobs


def body(prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    request = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    nvext = {"extra_fields": ["worker_id", "timing", "engine_data"], **more.pop("nvext", {})}
    return {**request, "ignore_eos": True, "nvext": nvext, **more}


def complete(made: Stack, prompt: list[int] | str, max_tokens: int = 8, **more: Any) -> Completion:
    answer = made.post(PATH, body(prompt, max_tokens, **more))
    assert answer.status_code == 200, answer.text
    return Completion(answer.json())


def complete_all(
    made: Stack, prompts: Iterable[list[int]], max_tokens: int = 8, at_once: int = 8, **more: Any
) -> list[Completion]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda prompt: complete(made, prompt, max_tokens, **more), prompts))


def texts(answers: Iterable[Completion]) -> list[str]:
    return [answer.text for answer in answers]
