"""Runs our engine with prompt embeddings, in one process forked from the zygote."""

from __future__ import annotations

import asyncio
import dataclasses
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpu.direct import CASES, Found, _tokens, both_ways, job, launched, long_way, outputs
from dynamo_vllm.engine.base import AddAdapter
from dynamo_vllm.job import Adapter, Embeds, Job
from harness.adapters import make_adapter, weight_shapes
from harness.tensors import rows, table

if TYPE_CHECKING:  # it imports vLLM, which `launch` prepares first
    from dynamo_vllm.engine.vllm.engine import VllmEngine

LORA = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "16")


def run_program(path: str) -> None:
    runpy.run_path(path)


async def run(model: str) -> dict[str, Found]:
    found: dict[str, Found] = {}
    for flags, scenarios in ((), (parity, cache, repetition, moved)), (LORA, (mixed,)):
        async with launched(model, *flags, takes_embeds=True) as engine:
            found |= {scenario.__name__: await scenario(engine) for scenario in scenarios}
    return found


def folder_of(engine: VllmEngine) -> Path:
    return Path(engine.llm.vllm_config.model_config.model)


def embedded(engine: VllmEngine, asked: Job) -> Job:
    """Returns the same job with the model's own embeddings of its prompt."""
    tensor = table(folder_of(engine))[list(asked.prompt)]
    return dataclasses.replace(asked, prompt=[0] * len(tensor), embeds=Embeds(len(tensor), tensor))


async def tokens(engine: VllmEngine, asked: Job) -> list[int]:
    return _tokens(await outputs(engine, asked))


async def parity(engine: VllmEngine) -> Found:
    """Runs each case as tokens and as embeddings, which know no repetition of the prompt's tokens."""
    cases = {name: asked for name, asked in CASES.items() if name != "penalties"}
    found = await both_ways(engine, {name: embedded(engine, asked) for name, asked in cases.items()})
    return found | {f"{name}, tokens": await tokens(engine, asked) for name, asked in cases.items()}


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


async def mixed(engine: VllmEngine) -> Found:
    """Embeddings and tokens in one batch, with and without adapters, get the same answers as alone."""
    folder = folder_of(engine)
    first = Adapter("a", 1, str(make_adapter(folder.with_name("adapter"), folder)), "a")
    words = Adapter("w", 2, words_adapter(folder.with_name("adapter-words"), folder), "w")
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


def words_adapter(folder: Path, base: Path) -> str:
    """Creates an adapter that also changes the embeddings of tokens."""
    size, width = weight_shapes(base)["model.embed_tokens.weight"]
    stem = "base_model.model.model.embed_tokens.lora_embedding"
    chance = np.random.default_rng(1)
    shapes = {f"{stem}_A": (8, size), f"{stem}_B": (width, 8)}
    matrices = {name: chance.standard_normal(shape, np.float32) / 2 for name, shape in shapes.items()}
    targets = {"target_modules": ["q_proj", "v_proj", "embed_tokens"]}
    return str(make_adapter(folder, base, config=targets, tensors=matrices))
