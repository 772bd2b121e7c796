"""Runs requests on bare AsyncLLM, as the reference. Runs in a child of the zygote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from cpu.bare import bare_engine


def run(model: str, cases_file: str, out_file: str) -> None:
    cases = json.loads(Path(cases_file).read_text())
    Path(out_file).write_text(json.dumps(asyncio.run(answers(model, cases))))


async def answers(model: str, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    adapters = any("adapter" in case for case in cases)
    # With adapters the one in use, and one: vLLM's CPU kernels need it.
    engine = bare_engine(model, enable_lora=adapters, max_loras=2 if adapters else 1)
    try:
        return [await answer(engine, f"case-{i}", case) for i, case in enumerate(cases)]
    finally:
        engine.shutdown()


async def answer(engine: Any, request_id: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(case["params"])
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    prompt = case["prompt"]
    given = {"prompt_token_ids": prompt} if isinstance(prompt, list) else {"prompt": prompt}
    choices: dict[int, Any] = {}
    async for result in engine.generate(
        given, SamplingParams(**params), request_id, lora_request=adapter(case)
    ):
        choices |= {choice.index: choice for choice in result.outputs}  # of some steps only some move
    return [
        {
            "text": choice.text,
            "token_ids": list(choice.token_ids),
            "finish_reason": choice.finish_reason,
            "logprobs": [at[t].logprob for t, at in zip(choice.token_ids, choice.logprobs, strict=True)]
            if choice.logprobs
            else None,
        }
        for _, choice in sorted(choices.items())
    ]


def adapter(case: dict[str, Any]) -> Any:
    """Converts {"adapter": [name, id, folder]} to vLLM's request for it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(*case["adapter"]) if case.get("adapter") else None
