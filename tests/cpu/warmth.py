"""Measures what the first request of each kind still builds after the warm-up, in worker and engine core.

Runs in a child of the zygote. The worker extension inspects the engine core.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu.direct import Found, figures, grown, launched
from cpu.vision import picture
from dynamo_vllm.engine.base import AddAdapter
from dynamo_vllm.engine.patches.cpu_worker import CpuWorkerExtension
from dynamo_vllm.job import Adapter, Output
from dynamo_vllm.media.loader import make_loader
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.serving.lifecycle import warmup

if TYPE_CHECKING:  # it imports vLLM, which `launch` prepares first
    from dynamo_vllm.engine.vllm.engine import VllmEngine

Request = dict[str, Any]
LORA = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8")
TOKENS = 4
SAMPLING: dict[str, Request] = {
    "greedy": {},
    "temperature": {"temperature": 0.9},
    "top-k and top-p": {"temperature": 0.9, "top_k": 7, "top_p": 0.8},
    "min-p": {"temperature": 0.9, "min_p": 0.1},
    "seed": {"temperature": 0.9, "seed": 7},
    "penalties": {"presence_penalty": 0.3, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {30: 2.0}},
    "choices": {"temperature": 0.9, "n": 3},
    "json": {"guided_decoding": {"json": {"type": "object", "properties": {"b": {"type": "string"}}}}},
    "json object": {"guided_decoding": {"json": {}}},
    "regex": {"guided_decoding": {"regex": "(ab|cd){3}"}},
    "choice": {"guided_decoding": {"choice": ["red", "green"]}},
    "grammar": {"guided_decoding": {"grammar": 'root ::= "x" [0-9]+'}},
}
OUTPUT: dict[str, Request] = {"logprobs": {"logprobs": 3}, "prompt logprobs": {"prompt_logprobs": 2}}


class Looks(CpuWorkerExtension):
    """Is mixed into vLLM's worker, which runs in the engine core."""

    def modules(self) -> list[str]:
        return sorted(sys.modules)


async def run(model: str, adapter: str, takes_embeds: bool) -> Found:
    flags = ("--worker-extension-cls", "cpu.warmth.Looks", *(LORA if adapter else ()))
    loader = make_loader(threads=1)
    async with launched(model, *flags, takes_embeds=takes_embeds) as engine, contextlib.aclosing(loader):
        reader = MediaReader(engine.facts, loader, engine.parts.media)
        role = Aggregated(engine.facts, engine.parts.embeds, reader)
        before = figures(engine)
        sees = engine.parts.media is not None
        scratch = Path(tempfile.mkdtemp())
        warming = warmup.Warming(engine, engine, role, lambda phase: None, sees, Path(model), scratch)
        with engine.counting.paused():
            await warmup.warm_up(warming)
        counted = grown(before, figures(engine))
        kinds = _kinds(engine, adapter)
        if adapter:
            await engine.control(AddAdapter(_adapter(adapter)))
        await _modules(engine)  # the look itself imports something, too
        return {"counted": counted, "new": {kind: await _new(engine, role, kind, kinds) for kind in kinds}}


def _adapter(path: str) -> Adapter:
    return Adapter("a", 1, path, "a")


async def _new(engine: VllmEngine, role: Aggregated, kind: str, kinds: dict[str, Request]) -> list[str]:
    """Returns the modules that a request of this kind imported, in either process."""
    before = await _modules(engine)
    request = role.parse(kinds[kind])
    adapter = _adapter(kinds[kind]["routing"]["lora_name"]) if kinds[kind]["routing"] else None
    job = await role.prepare(request, kind, adapter)
    encoder = role.encoder(request, job)

    def encoded(output: Output) -> None:
        encoder.encode(output)

    await engine.stream(job, encoded)
    return sorted(await _modules(engine) - before)


async def _modules(engine: VllmEngine) -> set[str]:
    (core,) = await engine.llm.collective_rpc("modules")
    return {f"core {name}" for name in core} | {f"worker {name}" for name in sys.modules}


def _kinds(engine: VllmEngine, adapter: str) -> dict[str, Request]:
    found = {kind: _request(number, sampling) for number, (kind, sampling) in enumerate(SAMPLING.items())}
    found |= {kind: _request(50, {}, output_options=options) for kind, options in OUTPUT.items()}
    if adapter:
        del found["prompt logprobs"]  # which the engine refuses beside adapters
    found["long"] = _request(60, {}, length=900)
    embeds, media = engine.parts.embeds, engine.parts.media
    if adapter:
        found["adapter"] = _request(61, {}, routing={"lora_name": adapter})
    if embeds is not None:
        found["embeds"] = _request(62, {}, length=0, prompt_embeds=embeds.smallest())
    if media is not None and "image" in (prompts := media.placeholders()):
        data = {"image_url": [{"Url": picture(1, 64, 48)}]}
        found["picture"] = _request(63, {}, token_ids=list(prompts["image"]), multi_modal_data=data)
    return found


def _request(first: int, sampling: Request, length: int = 20, **more: Any) -> Request:
    return {
        "token_ids": [20 + (first + i) % 80 for i in range(length)],
        "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True},
        "sampling_options": {"temperature": 0.0, **sampling},
        "output_options": {},
        "routing": None,
        **more,
    }
