"""Sends all phases of a plan to an engine as our worker has it: with its operations and names of adapters."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm import forking
from dynamo_vllm.engine import base
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm.launch import launch
from dynamo_vllm.job import Embeds, Guide, Job, Media, Output, SamplingSpec
from dynamo_vllm.lora.base import Fetched
from dynamo_vllm.lora.registry import Registry
from harness import metrics
from tiers_proof import contents
from tiers_proof.engines import TOPS
from tiers_proof.requests import Ask, Phase, Plan, in_other_orders

if TYPE_CHECKING:
    from dynamo_vllm.engine.vllm.engine import VllmEngine
    from dynamo_vllm.job import Adapter


def run(given: Mapping[str, Any]) -> dict[str, Any]:
    """Is called in a process of its own, with one life of a case."""
    from tiers_proof.cases import BY_NAME

    life = BY_NAME[given["case"]].lives[given["life"]]
    zygote = forking.make_zygote()  # of the engine core, before there are threads
    return asyncio.run(_answers(life.plan, given, zygote))


async def _answers(plan: Plan, given: Mapping[str, Any], zygote: forking.Zygote) -> dict[str, Any]:
    flags = dict(given["flags"])
    model, transfer = flags.pop("model"), flags.pop("kv_transfer_config", None)
    settings = EngineSettings(
        model=model,
        argv=tuple(_arguments(flags)),
        environment=dict(os.environ),
        publishes_kv_events=False,
        takes_embeds=bool(flags.get("enable_prompt_embeds")),
        lora=bool(flags.get("enable_lora")),
        kv_transfer=transfer,
        zygote=zygote,
    )
    engine = await launch(settings, lambda load: None, lambda phase: None)
    try:
        asking = Asking(engine, given)
        block = engine.llm.vllm_config.cache_config.block_size
        phases = in_other_orders(plan(block)[: given["last"]], given["orders"])
        return {"block": block, "phases": [await asking.run(phase) for phase in phases]}
    finally:
        await engine.close()


def _arguments(flags: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


class Asking:
    """Sends requests to a running engine."""

    def __init__(self, engine: VllmEngine, given: Mapping[str, Any]) -> None:
        self._engine, self._given, self._count = engine, given, 0
        self._registry = Registry(_NoSteps(), 9)
        self._adapters = given["adapters"]
        self._loaded: dict[str, Adapter] = {}

    async def run(self, phase: Phase) -> dict[str, Any]:
        if phase.before is not None:
            await self._operate(phase.before)
        before = self._figures()
        if phase.together:
            found = await asyncio.gather(
                *(self._answer(ask, phase.aborts.get(ask.name)) for ask in phase.asks)
            )
        else:
            found = [await self._answer(ask, None) for ask in phase.asks]
        grown = {name: value - before.get(name, 0) for name, value in self._figures().items()}
        answers = {ask.name: each for ask, each in zip(phase.asks, found, strict=True) if each is not None}
        return {"name": phase.name, "answers": answers, "figures": {n: v for n, v in grown.items() if v}}

    async def _operate(self, what: str) -> None:
        engine = self._engine
        if what == "clear":
            await engine.control(base.ResetCache(frozenset({"prefix"})))
        elif what in ("sleep-1", "sleep-2", "other-weights"):
            await engine.control(base.Sleep(1 if what == "sleep-1" else 2))
            if what == "other-weights":
                config = engine.llm.vllm_config.model_config
                shutil.copy2(self._given["other_weights"], config.model)
            await engine.control(base.Wake())
            if what == "other-weights" and not config.enable_sleep_mode:  # then nothing was lost
                await engine.llm.collective_rpc("reload_weights")
        elif what == "other-adapter":
            for adapter in self._loaded.values():
                await engine.control(base.RemoveAdapter(adapter))
            self._loaded.clear()
            self._adapters = self._given["other_adapters"]
        else:
            raise ValueError(what)

    async def _answer(self, ask: Ask, aborted_after: int | None) -> dict[str, Any] | None:
        self._count += 1
        job = await self._job(ask, f"{ask.name}-{self._count}")
        outputs: list[Output] = []
        ended = asyncio.Event()

        def keep(output: Output) -> None:
            outputs.append(output)
            if aborted_after is not None and len(outputs) >= aborted_after:
                ended.set()

        running = asyncio.create_task(self._engine.stream(job, keep))
        if aborted_after is not None:
            waiting = asyncio.create_task(ended.wait())
            await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            await self._engine.abort(job.id)
        await running
        return None if aborted_after is not None else _answer(outputs, ask.n)

    async def _job(self, ask: Ask, name: str) -> Job:
        sampling = SamplingSpec(
            max_tokens=ask.max_tokens,
            temperature=0.0 if ask.n == 1 else 0.9,
            n=ask.n,
            logprobs=TOPS,
            prompt_logprobs=0 if ask.prompt_logprobs else None,
            ignore_eos=ask.regex is None,
            guide=None if ask.regex is None else Guide(regex=ask.regex),
        )
        prompt = list(ask.prompt)
        config: Any = self._engine.llm.vllm_config.model_config
        embeds = media = None
        if ask.embeds is not None:
            embeds = Embeds(len(prompt), contents.embeddings(ask, config.get_hidden_size()))
        if ask.image is not None:
            assert self._engine.parts.media is not None
            picture = Media("image", contents.picture(ask.image), f"picture-{ask.image}")
            media = await self._engine.parts.media.process(
                contents.prompt(ask, config)["prompt_token_ids"], [picture]
            )
            prompt = list(media.tokens)
        adapter = await self._adapter(ask.adapter) if ask.adapter else None
        return Job(
            name,
            prompt,
            sampling,
            cache_salt=ask.salt,
            adapter=adapter,
            embeds=embeds,
            media=media,
            data_parallel_rank=ask.rank,
        )

    async def _adapter(self, name: str) -> Adapter:
        if name not in self._loaded:
            path, digest = self._adapters[name]
            made = self._registry._identify(name, Fetched(Path(path), digest, 1))
            await self._engine.control(base.AddAdapter(made))
            self._loaded[name] = made
        return self._loaded[name]

    def _figures(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for sample in metrics.samples(self._engine.metrics_text()):
            if sample.name == "vllm:prompt_tokens_cached_by_source_total":
                source = sample.labels["source"]
                found[source] = found.get(source, 0) + int(sample.value)
            elif sample.name == "vllm:num_preemptions_total":
                found["num_preemptions"] = found.get("num_preemptions", 0) + int(sample.value)
        return found


class _NoSteps:
    """The registry only names adapters here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


def _answer(outputs: list[Output], n: int) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [{"tokens": [], "logprobs": [], "tops": []} for _ in range(n)]
    prompt_logprobs = cached = None
    for output in outputs:
        choice = choices[output.index]
        choice["tokens"] += list(output.token_ids)
        for position in output.logprobs or ():
            choice["logprobs"].append(position.chosen.logprob)
            found = (position.chosen, *position.candidates)
            choice["tops"].append([[each.token_id, each.logprob] for each in found])
        cached = output.cached_tokens if output.cached_tokens is not None else cached
        if output.prompt_logprobs is not None:
            prompt_logprobs = [at.chosen.logprob if at else None for at in output.prompt_logprobs]
    return {"cached": cached, "prompt_logprobs": prompt_logprobs, "choices": choices}
