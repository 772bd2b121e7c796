"""Runs our engine with prompt embeddings, in one process forked from the zygote."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpu.direct import FLAGS, Found, _tokens, figures, grown, job, long_way, outputs
from dynamo_vllm.engine.base import AddAdapter, RemoveAdapter
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.launch import launch
from dynamo_vllm.job import Adapter, Embeds, Job
from harness.tensors import rows, table

if TYPE_CHECKING:  # it imports vLLM, which `launch` prepares first
    from dynamo_vllm.engine.vllm.engine import VllmEngine

LORA = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "16")


def run_program(path: str) -> None:
    runpy.run_path(path)


def run(model: str, scenario: str, out_file: str) -> None:
    Path(out_file).write_text(json.dumps(asyncio.run(_run(model, SCENARIOS[scenario]))))


async def _run(model: str, scenario: Callable[[VllmEngine], Awaitable[Found]]) -> Found:
    flags = (*FLAGS, *LORA) if scenario in (adapter, mixed) else FLAGS
    settings = EngineSettings(
        model=model,
        argv=flags,
        environment=dict(os.environ),
        publishes_kv_events=False,
        takes_embeds=True,
    )
    engine = await launch(settings, lambda load: None, lambda phase: None)
    try:
        return await scenario(engine)
    finally:
        await engine.close()


def folder_of(engine: VllmEngine) -> Path:
    return Path(engine.llm.vllm_config.model_config.model)


def embedded(engine: VllmEngine, asked: Job) -> Job:
    """Returns the same job with the model's own embeddings of its prompt."""
    tensor = table(folder_of(engine))[list(asked.prompt)]
    return dataclasses.replace(asked, prompt=[0] * len(tensor), embeds=Embeds(len(tensor), tensor))


async def tokens(engine: VllmEngine, asked: Job) -> list[int]:
    return _tokens(await outputs(engine, asked))


async def parity(engine: VllmEngine) -> Found:
    """Runs each case as tokens and as embeddings, with and without direct egress, cold and cached."""
    prompt = [10 + i * 7 % 800 for i in range(100)]
    cases = {
        "greedy": job("greedy", prompt, max_tokens=40),
        "one row": job("one", [30], max_tokens=1),
        "sampled": job("sampled", [40, 41, 42], temperature=0.8, seed=7, max_tokens=30),
        "stop token": job("stop", [50, 51], stop_token_ids=list(range(10, 400)), max_tokens=60),
        "min tokens": job("min", [50, 52], stop_token_ids=list(range(10, 900)), min_tokens=9, max_tokens=60),
        "presence": job("pen", [60, 61], presence_penalty=0.5, frequency_penalty=0.5, max_tokens=30),
        "long prompt": job("long", [10 + i % 800 for i in range(1500)], max_tokens=20),
    }
    found: Found = {}
    other = long_way(engine)
    for name, asked in cases.items():
        found[f"{name}, tokens"] = await tokens(engine, asked)
        for at in ("cold", "warm"):
            for way, made in (("direct", engine), ("long", other)):
                await engine.llm.reset_prefix_cache()
                if at == "warm":
                    await outputs(other, embedded(engine, asked))
                before = figures(made)
                answer = await outputs(made, embedded(engine, asked))
                found[f"{name}, {at}, {way}"] = {"outputs": answer, "grown": grown(before, figures(made))}
    return found


async def cache(engine: VllmEngine) -> Found:
    """Sends prompts of the same length with other content; each must get its own answer."""
    length = 96
    zeros = job("zeros", [0] * length, max_tokens=6)
    jobs = {
        "tokens": job("t", [10 + i for i in range(length)], max_tokens=6),
        "zeros": zeros,
        "zeros embedded": embedded(engine, zeros),
        "one": dataclasses.replace(zeros, embeds=Embeds(length, rows(length))),
        "other": dataclasses.replace(zeros, embeds=Embeds(length, rows(length + 1)[:length].clone())),
        "salted": dataclasses.replace(zeros, embeds=Embeds(length, rows(length)), cache_salt="mine"),
    }
    found: Found = {}
    for name, asked in jobs.items():
        await engine.llm.reset_prefix_cache()
        found[f"{name}, alone"] = await tokens(engine, asked)
    await engine.llm.reset_prefix_cache()
    for again in ("first", "again"):
        for name, asked in jobs.items():
            answer = await outputs(engine, asked)
            found[f"{name}, {again}"] = {"tokens": _tokens(answer), "cached": answer[-1]["cached_tokens"]}
    return found


async def repetition(engine: VllmEngine) -> Found:
    """A penalty applies to the prompt's tokens; with embeddings not to the tokens of other requests."""
    asked = embedded(engine, job("r", [20, 21, 22], repetition_penalty=2.0, max_tokens=12))
    before = await tokens(engine, asked)
    for token in before:
        await tokens(engine, job("other", [token] * 40, max_tokens=2))
    return {"before": before, "after": await tokens(engine, asked)}


async def moved(engine: VllmEngine) -> Found:
    """An answer that another worker started continues as if it had not been interrupted."""
    asked = embedded(engine, job("whole", [10 + i for i in range(70)], max_tokens=40))
    whole = await tokens(engine, asked)
    found: Found = {"whole": whole}
    for made in (1, 7, 39):
        rest = dataclasses.replace(asked.sampling, max_tokens=40 - made)
        moved_job = dataclasses.replace(
            asked, id=f"m{made}", prompt=[*asked.prompt, *whole[:made]], sampling=rest
        )
        for way, engine_of in (("direct", engine), ("long", long_way(engine))):
            found[f"{made}, {way}"] = whole[:made] + await tokens(engine_of, moved_job)
    return found


async def adapter(engine: VllmEngine) -> Found:
    """An adapter gives the same answer to embeddings as to tokens."""
    plain = job("p", [10 + i for i in range(50)], max_tokens=12)
    made = Adapter("a", 1, make_adapter(folder_of(engine).with_name("adapter")), "a")
    found: Found = {"base": await tokens(engine, plain)}
    await engine.control(AddAdapter(made))
    asked = dataclasses.replace(plain, adapter=made)
    for way, engine_of in (("direct", engine), ("long", long_way(engine))):
        found[f"tokens, {way}"] = await tokens(engine_of, asked)
        found[f"embeds, {way}"] = await tokens(engine_of, embedded(engine, asked))
    found["base after"] = await tokens(engine, embedded(engine, plain))
    await engine.control(RemoveAdapter(made))
    return found


async def mixed(engine: VllmEngine) -> Found:
    """Embeddings and tokens in one batch, with and without adapters, get the same answers as alone."""
    folder = folder_of(engine)
    first = Adapter("a", 1, make_adapter(folder.with_name("adapter")), "a")
    words = Adapter("w", 2, make_adapter(folder.with_name("adapter-words"), words=True), "w")
    for adapter in (first, words):
        await engine.control(AddAdapter(adapter))
    jobs = {}
    for number, made in enumerate((None, first, words)):
        plain = job("", [10 + number + i for i in range(40 + 7 * number)], max_tokens=12)
        name, asked = made.name if made else "base", dataclasses.replace(plain, adapter=made)
        jobs[f"{name}, tokens"] = asked
        jobs[f"{name}, embeds"] = embedded(engine, asked)
    jobs = {name: dataclasses.replace(asked, id=name) for name, asked in jobs.items()}
    found: Found = {f"{name}, alone": await tokens(engine, asked) for name, asked in jobs.items()}
    for round_ in range(3):
        await engine.llm.reset_prefix_cache()
        names = [*jobs][round_:] + [*jobs][:round_]  # which of them are in one step differs
        for name, answer in zip(
            names, await asyncio.gather(*(tokens(engine, jobs[name]) for name in names)), strict=True
        ):
            found[f"{name}, together {round_}"] = answer
    return found


def make_adapter(folder: Path, words: bool = False) -> str:
    """Creates an adapter; with `words` it also changes the embeddings of tokens."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    chance = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", 256), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, 256, generator=chance) * 0.5
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=chance) * 0.5
    if words:
        at = "base_model.model.model.embed_tokens"
        size = json.loads((folder.with_name("tiny") / "config.json").read_text())["vocab_size"]
        weights[f"{at}.lora_embedding_A"] = torch.randn(8, size, generator=chance) * 0.5
        weights[f"{at}.lora_embedding_B"] = torch.randn(256, 8, generator=chance) * 0.5
    save_file(weights, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj", *(["embed_tokens"] if words else [])],
        "base_model_name_or_path": "tiny",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


SCENARIOS: dict[str, Callable[[VllmEngine], Awaitable[Found]]] = {
    made.__name__: made for made in (parity, cache, repetition, moved, adapter, mixed)
}
