"""Starts AsyncLLM in a prepared process and assembles the engine.

This module imports vLLM. So only `launch` imports it, after the variables are set and the patches applied.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from vllm.v1.engine.async_llm import AsyncLLM

from dynamo_vllm.engine.base import Counting, EngineParts
from dynamo_vllm.engine.encoder_cache import connector as encoder_cache_connector
from dynamo_vllm.engine.encoder_cache.folder import Folder
from dynamo_vllm.engine.process import core_fork
from dynamo_vllm.engine.process import environment as vllm_environment
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.structured_output import vllm_grammars
from dynamo_vllm.engine.structured_output.checker import Limits
from dynamo_vllm.engine.structured_output.gate import GuideGate
from dynamo_vllm.engine.vllm import facts as vllm_facts
from dynamo_vllm.engine.vllm import kv_events
from dynamo_vllm.engine.vllm import stats as vllm_stats
from dynamo_vllm.engine.vllm.control import Control
from dynamo_vllm.engine.vllm.direct import Direct
from dynamo_vllm.engine.vllm.engine import VllmEngine
from dynamo_vllm.engine.vllm.output_socket import Receiver
from dynamo_vllm.engine.vllm.parts import parsing
from dynamo_vllm.engine.vllm.parts import tiers as vllm_tiers
from dynamo_vllm.engine.vllm.parts.embeds import VllmEmbeds
from dynamo_vllm.engine.vllm.parts.encoded import EncodedFolder
from dynamo_vllm.engine.vllm.parts.media import VllmMedia
from dynamo_vllm.engine.vllm.parts.pooling import VllmPoolingPrompts
from dynamo_vllm.engine.vllm.parts.renderer import VllmRenderer
from dynamo_vllm.engine.vllm.parts.speech import VllmSpeech
from dynamo_vllm.engine.vllm.parts.tokens import VllmTokens
from dynamo_vllm.engine.vllm.runs.pooling import PoolingRuns
from dynamo_vllm.engine.vllm.runs.speech import SpeechRuns
from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AsyncExitStack

    from vllm.parser.abstract_parser import Parser

    from dynamo_vllm.engine.base import OnLoad, OnPhase
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.names import Config, Llm, ModelConfig
    from dynamo_vllm.engine.vllm.preparation import Prepared
    from dynamo_vllm.job import EngineFacts, PoolingFacts


async def assemble(
    prepared: Prepared, settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase, ends: AsyncExitStack
) -> VllmEngine:
    """Starts vLLM and returns the engine, which takes over `ends`: the stack of what must be closed."""
    config = prepared.config
    parser = parsing.parser_class(settings, config.model_config)
    relay = kv_events.relay(config, settings)
    if relay is not None:
        ends.callback(relay.close)
    guides = guide_gate(config, settings)
    ends.callback(guides.close)
    counting, steps = Counting(), dict[int, int]()

    def count(rank: int) -> None:
        steps[rank] = steps.get(rank, 0) + 1

    llm = _started(prepared, settings, vllm_stats.loggers(on_load, count, counting))
    ends.push_async_callback(end, llm)
    direct = None
    if settings.direct_egress:
        ends.callback(Receiver(llm.engine_core.resources.output_socket).close)
        direct = Direct(llm)
    vllm_environment.cache_environment()
    on_phase("cache")
    steps.update(dict.fromkeys(llm.engine_core.engine_ranks_managed, 0))
    tasks = await llm.get_supported_tasks() if config.model_config.runner_type == "pooling" else ()
    relayed = relay.addresses if relay is not None else {}
    facts = vllm_facts.read(llm, prepared.resolved.fired, relayed, tasks)
    parts = _parts(llm, settings, facts, parser, ends)
    return VllmEngine(
        llm=llm,
        facts=facts,
        parts=parts,
        counting=counting,
        steps=steps,
        operations=Control(llm),
        guides=guides,
        direct=direct,
        pooling=PoolingRuns(llm) if facts.pooling is not None else None,
        speech=SpeechRuns(llm, parts.speech) if isinstance(parts.speech, VllmSpeech) else None,
        connector_metrics_url=settings.connector_metrics_url,
        ends=ends.pop_all(),
    )


def _started(prepared: Prepared, settings: EngineSettings, loggers: list[Callable[..., object]]) -> Llm:
    args = prepared.resolved.args
    try:
        with core_fork.forked_cores(settings.zygote, prepared.config):
            started: Llm = AsyncLLM.from_vllm_config(
                prepared.config,
                stat_loggers=loggers,
                enable_log_requests=args.enable_log_requests,
                disable_log_stats=args.disable_log_stats,
            )
            return started
    except (RuntimeError, ValueError, OSError) as exc:
        raise StartError(f"vLLM did not start: {exc}") from exc


async def end(llm: Llm) -> None:
    """Shuts vLLM down, in a thread because vLLM waits for its processes."""
    if llm.output_handler is not None:
        llm.output_handler.cancel()  # it would log the shutdown as a crash of the engine
    await in_thread(llm.shutdown)


def guide_gate(config: Config, settings: EngineSettings) -> GuideGate:
    """Creates the guide gate; its processes load the tokenizer while the engine loads the model."""
    limits = Limits(settings.guide_seconds, settings.guide_memory_bytes)
    return GuideGate.opened(
        vllm_grammars.LOAD,
        vllm_grammars.payload(config),
        limits,
        settings.zygote,
        at_once=settings.takes_guides,
    )


def _parts(
    llm: Llm,
    settings: EngineSettings,
    facts: EngineFacts,
    parser: type[Parser] | None,
    ends: AsyncExitStack,
) -> EngineParts:
    model = llm.vllm_config.model_config
    embeds = None
    if model.enable_prompt_embeds:
        embeds = VllmEmbeds(model)
        ends.callback(embeds.close)
    return EngineParts(
        renderer=VllmRenderer(llm.renderer, parser),
        tokens=VllmTokens(llm.renderer),
        embeds=embeds,
        media=VllmMedia(llm.renderer) if facts.media and facts.speech is None else None,
        encoded=_encoded(settings, facts.encoder, model),
        pooling=_pooling(llm, settings, facts.pooling),
        speech=VllmSpeech(llm.renderer, facts.speech, model) if facts.speech is not None else None,
        tiers=vllm_tiers.tiers(llm, facts),
    )


def _pooling(llm: Llm, settings: EngineSettings, facts: PoolingFacts | None) -> VllmPoolingPrompts | None:
    if facts is None:
        return None
    template = Path(settings.pair_template).read_text() if settings.pair_template else None
    return VllmPoolingPrompts(llm.renderer, llm.vllm_config, template, facts.scoring)


def _encoded(settings: EngineSettings, encoder: str, model: ModelConfig) -> EncodedFolder | None:
    """Returns the reader of encoder outputs; None if there are none, or if they arrive by a connector."""
    if not settings.takes_encoded or not settings.encoder_folder:
        return None
    folder = Folder(Path(settings.encoder_folder, encoder), settings.encoder_folder_bytes)
    return EncodedFolder(folder, encoder_cache_connector.width(model), model.dtype)
