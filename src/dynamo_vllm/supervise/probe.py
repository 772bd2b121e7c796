"""Checks the started processes over HTTP: does the process answer, and does a model."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

Request = tuple[str, dict[str, Any]]
"""Path and body."""
_RETRY_SECONDS = 0.1
# The frontend learns of workers through discovery; it may not know them the moment they are ready.
_NOT_YET = (404, 503)
POOLING_PATHS = ("embeddings", "classify", "pooling")
"""Endpoints of pooling models; each has a path of its name."""


class Probe:
    """An HTTP client for this machine: no proxy, and it accepts our own certificates."""

    def __init__(self, answer_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._client = httpx.AsyncClient(trust_env=False, verify=False, timeout=answer_seconds)

    async def close(self) -> None:
        await self._client.aclose()

    async def status(self, url: str, seconds: float | None = None) -> int | None:
        """Return the status of a GET; None if there is no answer within so long."""
        seconds = self._answer_seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                return (await self._client.get(url, timeout=None)).status_code
        except (httpx.HTTPError, TimeoutError):
            return None

    async def first_answer(
        self, url: str, models: Mapping[str, Collection[str]], split: Collection[str], limit_seconds: float
    ) -> None:
        """Wait until the frontend is ready and each model has answered a request; StartError if one does not.

        `models` has the types of endpoints of each. A model in `split` must answer through two workers, one
        for the prompt and one for the answer.
        """
        deadline = time.monotonic() + limit_seconds
        while await self.status(f"{url}/health") != 200:
            if time.monotonic() > deadline:
                raise StartError(f"{url}/health did not become ready within {limit_seconds:.0f} s")
            await asyncio.sleep(_RETRY_SECONDS)
        for model, endpoint_types in models.items():
            requests = list(_smallest_requests(model, endpoint_types, model in split))
            if requests:  # none if only the gateway serves it
                await self._answer(url, model, requests, model in split, deadline)

    async def _answer(
        self, url: str, model: str, requests: list[Request], split: bool, deadline: float
    ) -> None:
        while True:
            refusals = []
            for path, body in requests:
                refusal = await self._refusal(url + path, body, split, deadline)
                if refusal is None:
                    return
                refusals.append(refusal)
            if time.monotonic() > deadline or all(status not in _NOT_YET for status, _ in refusals):
                raise StartError(f"the first request to {model} failed: {refusals[0][1]}")
            await asyncio.sleep(_RETRY_SECONDS)

    async def _refusal(
        self, url: str, body: dict[str, object], split: bool, deadline: float
    ) -> tuple[int, str] | None:
        """Return status and text of a refused request; None if it was answered."""
        try:
            reply = await self._client.post(url, json=body, timeout=max(deadline - time.monotonic(), 1.0))
        except httpx.HTTPError as exc:
            return 503, f"POST {url}: {exc or type(exc).__name__}"
        if reply.status_code == 200 and (reply.json().get("choices") or reply.json().get("data")):
            if split and not went_over_two(reply.json()):
                return 503, f"POST {url} was answered without a prefill worker"
            return None
        return reply.status_code, f"POST {url} answered {reply.status_code}: {reply.text[:500]}"


def _smallest_requests(model: str, endpoint_types: Collection[str], split: bool) -> Iterator[Request]:
    """Only on endpoints of the model: the frontend counts other requests as errors of the model."""
    media_requests = [
        request for kind, request in smallest_media_requests(model).items() if kind in endpoint_types
    ]
    if media_requests:  # in a chat it would run all its steps: minutes for some
        yield from media_requests
        return
    for path in POOLING_PATHS:
        if path in endpoint_types:
            yield f"/v1/{path}", {"model": model, "input": "Hello"}
            return
    body: dict[str, object] = {"model": model, "max_tokens": 1}
    if split:
        body["nvext"] = {"extra_fields": ["worker_id"]}
    if "completions" in endpoint_types:
        yield "/v1/completions", {**body, "prompt": "Hello"}
    if "chat" in endpoint_types:
        yield "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": "Hello"}]}


def smallest_media_requests(model: str) -> dict[str, Request]:
    """Requests for models that generate images or videos, by type of endpoint."""
    settings = {"num_inference_steps": 1}
    video = {"model": model, "prompt": "Hello", "nvext": {**settings, "num_frames": 1}}
    return {
        "images": ("/v1/images/generations", {"model": model, "prompt": "Hello", "nvext": settings}),
        "videos": ("/v1/videos", video),
    }


def went_over_two(answer: dict[str, Any]) -> bool:
    """If one worker did the whole request, the frontend names it twice."""
    workers = (answer.get("nvext") or {}).get("worker_id") or {}
    prefill = workers.get("prefill_worker_id")
    return prefill is not None and prefill != workers.get("decode_worker_id")
