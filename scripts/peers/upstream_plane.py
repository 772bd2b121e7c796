"""Upstream's vLLM worker over a fake engine: its handler, event loop and endpoints are its own.

    PEER_PYTHON -P scripts/peers/upstream_plane.py --model FOLDER --served-model-name NAME …

Takes the arguments of `python -m dynamo.vllm` and needs an environment with `ai-dynamo` and vLLM. `-P` keeps
this folder off the path, where `profile` would hide the one of the standard library. Only
`AsyncLLM.from_vllm_config` is replaced; everything in front of the engine runs as upstream wrote it. The fake
is as cheap as an engine can be: no queue, no detokenizer, one pair of objects per request, used again for
each token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

VOCAB_SIZE = 1000
TOTAL_KV_BLOCKS = 1024


class FakeAsyncLLM(AsyncLLM):  # type: ignore[misc]  # vLLM is not followed
    """The part of AsyncLLM that upstream's aggregated worker calls; upstream insists on the type."""

    tokenizer = None
    log_stats = False

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        vllm_config.cache_config.num_gpu_blocks = TOTAL_KV_BLOCKS

    def __del__(self) -> None:
        """AsyncLLM's would shut down what was never started."""

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        ids = prompt["prompt_token_ids"]
        choice = CompletionOutput(0, "", [], None, None)
        output = RequestOutput(request_id, None, ids, None, [choice], False, num_cached_tokens=0)
        last = (sampling_params.max_tokens or 16) - 1
        for number in range(last + 1):
            if number:
                await asyncio.sleep(0)
            choice.token_ids = [10 + (ids[0] * 7 + len(ids) + number) % (VOCAB_SIZE - 10)]
            if number == last:
                choice.finish_reason, output.finished = "length", True
            yield output

    async def abort(self, *_: Any, **__: Any) -> None:
        """Requests here end by themselves."""

    async def check_health(self) -> None:
        """It is never unwell."""

    async def do_log_stats(self) -> None:
        """It has none."""

    async def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def shutdown(self, *_: Any, **__: Any) -> None:
        """Nothing runs."""


def main() -> None:
    from dynamo.vllm.main import main as upstream

    def made(vllm_config: Any, **_: Any) -> FakeAsyncLLM:
        return FakeAsyncLLM(vllm_config)

    AsyncLLM.from_vllm_config = made
    upstream()


if __name__ == "__main__":
    main()
