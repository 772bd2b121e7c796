"""Answers of vLLM without our worker, as the reference; each function runs in a child of the zygote."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from harness.warm import CACHE_BLOCKS

SPEECH_PROMPTS = {
    False: "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>",
    True: "<|startoftranscript|><|en|><|transcribe|><|0.00|>",
}


def engine(model: str, *, max_model_len: int = 2048, **flags: Any) -> Any:
    """Returns an AsyncLLM whose engine core is forked from this process."""
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # vLLM 0.30 compiles its sampler within the first request, and dies where there is no C++ compiler.
    torch.compiler.set_stance("force_eager")
    args = AsyncEngineArgs(
        model=model,
        max_model_len=max_model_len,
        enforce_eager=True,
        dtype="float32",
        block_size=32,
        distributed_executor_backend="uni",
        num_gpu_blocks_override=CACHE_BLOCKS,
        **flags,
    )
    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


async def completions(model: str, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Returns the choices of each {"prompt": …, "params": …, "adapter": (name, id, folder)}."""
    adapters = any("adapter" in case for case in cases)
    # With adapters the one in use, and one: vLLM's CPU kernels need it.
    llm = engine(model, enable_lora=adapters, max_loras=2 if adapters else 1)
    try:
        return [await _completion(llm, f"case-{number}", case) for number, case in enumerate(cases)]
    finally:
        llm.shutdown()


async def _completion(llm: Any, request_id: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    params = dict(case["params"])
    if "structured_outputs" in params:
        params["structured_outputs"] = StructuredOutputsParams(**params["structured_outputs"])
    adapter = LoRARequest(*case["adapter"]) if case.get("adapter") else None
    prompt, choices = {"prompt_token_ids": case["prompt"]}, dict[int, Any]()
    async for result in llm.generate(prompt, SamplingParams(**params), request_id, lora_request=adapter):
        choices |= {choice.index: choice for choice in result.outputs}  # of some steps only some move
    return [
        {
            "text": choice.text,
            "finish_reason": choice.finish_reason,
            "logprobs": [at[t].logprob for t, at in zip(choice.token_ids, choice.logprobs, strict=True)]
            if choice.logprobs
            else None,
        }
        for _, choice in sorted(choices.items())
    ]


async def chats(model: str, cases: Mapping[str, Any], max_tokens: int, **flags: Any) -> dict[str, Any]:
    """Returns text, prompt ids and answer ids of each, with vLLM's own fetching, decoding and rendering."""
    from vllm import SamplingParams

    llm, answers = engine(model, **flags), {}
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    try:
        for name, messages in cases.items():
            prompt = await _rendered(llm, messages, add_generation_prompt=True)
            async for result in llm.generate(prompt, sampling, name):
                (answer,), ids = result.outputs, list(result.prompt_token_ids)
            answers[name] = answer.text, ids, list(answer.token_ids)
    finally:
        llm.shutdown()
    return answers


async def embedded_chats(model: str, chats: list[Any]) -> list[list[float]]:
    from vllm import PoolingParams

    llm, answers = engine(model, runner="pooling", enable_prefix_caching=False), list[list[float]]()
    try:
        for number, messages in enumerate(chats):
            prompt = await _rendered(llm, messages, add_generation_prompt=False)
            results = llm.encode(prompt, PoolingParams(task="embed"), f"chat-{number}")
            answers += [result.outputs.data.tolist() async for result in results]
    finally:
        llm.shutdown()
    return answers


async def _rendered(llm: Any, messages: Any, **settings: Any) -> Any:
    from vllm.renderers import ChatParams

    _, (prompt,) = await llm.renderer.render_chat_async([messages], ChatParams(chat_template_kwargs=settings))
    return prompt


def pooling(model: str, cases: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """Returns the answers to {"embed": texts, "adapted": texts, "score": [query, documents], …}."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    shared = {"max_model_len": 2048, "enforce_eager": True, "dtype": "float32", "block_size": 32}
    llm = LLM(model, runner="pooling", num_gpu_blocks_override=1024, **shared, **flags)
    answers: dict[str, Any] = {}
    if "embed" in cases:
        results = llm.embed(cases["embed"], use_tqdm=False)
        answers["embed"] = [result.outputs.embedding for result in results]
        answers["tokens"] = [len(result.prompt_token_ids) for result in results]
    if "adapter" in cases:
        adapter = LoRARequest(*cases["adapter"])
        results = llm.embed(cases["embed"], lora_request=adapter, use_tqdm=False)
        answers["adapted"] = [result.outputs.embedding for result in results]
    if "score" in cases:
        query, documents = cases["score"]
        results = llm.score(query, documents, use_tqdm=False, chat_template=cases.get("template"))
        answers["score"] = [result.outputs.score for result in results]
    if "classify" in cases:
        results = llm.classify(cases["classify"], use_tqdm=False)
        answers["classify"] = [result.outputs.probs for result in results]
    return answers


async def speech(model: str, cases: Mapping[str, tuple[np.ndarray[Any, Any], bool]]) -> dict[str, Any]:
    """Returns text and tokens of each; a case has samples, and whether times are to be told."""
    from vllm import SamplingParams

    llm, answers = engine(model, max_model_len=64), {}
    try:
        for name, (samples, is_timed) in cases.items():
            prompt = {
                "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, 16_000)}},
                "decoder_prompt": {"prompt": SPEECH_PROMPTS[is_timed]},
            }
            async for result in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=60), name):
                (answer,) = result.outputs
            answers[name] = answer.text, list(answer.token_ids)
    finally:
        llm.shutdown()
    return answers
