"""Assembles a worker; the only file that knows everything."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.llm import WorkerMetricsPublisher, fetch_model

from dynamo_vllm.config import nodes
from dynamo_vllm.config.rules.flags import engine_flags
from dynamo_vllm.engine import vllm_start
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.errors import EngineDead, StartError
from dynamo_vllm.kv import connectors, events
from dynamo_vllm.kv.connectors.base import OFFLOAD_GB, Needs, Place
from dynamo_vllm.roles import aggregated, decode, prefill, text
from dynamo_vllm.serving import headless, lifeline, metrics, runtime, scratch
from dynamo_vllm.serving.cancel import InFlight
from dynamo_vllm.serving.ending import EXIT_ENGINE_DEAD, on_signals
from dynamo_vllm.serving.endpoints import Registration
from dynamo_vllm.serving.lifecycle import Lifecycle, State
from dynamo_vllm.serving.monitor import Monitor
from dynamo_vllm.serving.peers import Peers
from dynamo_vllm.serving.progress import Progress
from dynamo_vllm.serving.request import Service

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo.runtime import DistributedRuntime

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.engine.base import Engine, OnLoad, OnPhase, TextEngine
    from dynamo_vllm.job import EngineFacts, Job
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.roles.base import Role, RoleCard

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 25.0


async def run(options: WorkerOptions, engine_argv: Sequence[str], environment: Mapping[str, str]) -> int:
    """The life of a worker, from options to exit code."""
    progress = Progress(options.status_fd)
    node = nodes.of(options.headless, engine_flags(engine_argv))
    with scratch.folder() as scratch_folder:
        drt = runtime.create(options) if not node.is_headless else runtime.alone()
        named = options.model
        options = await with_local_model(options, progress)
        settings = engine_settings(options, engine_argv, environment, scratch_folder)
        settings = dataclasses.replace(settings, is_local=options.model == named)
        if settings.prometheus_folder:
            os.makedirs(settings.prometheus_folder, exist_ok=True)
        if node.is_headless:
            return await headless.run(settings, drt, progress)
        meter = metrics.LoadMeter()
        engine = make_engine(options, settings, meter.record, progress.phase)
        try:
            async with lifeline.followers(node) as followers:
                facts = await engine.start()
                connector = connector_of(options, engine_argv)
                return await serve(options, drt, engine, facts, meter, progress, connector, followers)
        finally:
            await close(engine, drt)


async def with_local_model(options: WorkerOptions, progress: Progress) -> WorkerOptions:
    """The options with the model as a folder; a hub id is fetched and stays the served name."""
    model = str(options.model)
    if os.path.isdir(model):  # noqa: ASYNC240  # nothing else runs yet
        return options
    if model.startswith(("/", ".", "~")):
        raise StartError(f"--model {model}: there is no such folder")
    progress.phase("fetching", model=model)
    try:
        folder = await fetch_model(model)
    except Exception as exc:
        raise StartError(
            f"--model {model}: not a folder, and the hub does not give it: {exc}. "
            "Check the name and the network, or give a local folder"
        ) from exc
    return dataclasses.replace(options, model=folder, served_model_name=options.served_model_name or (model,))


def role_card(options: WorkerOptions) -> RoleCard:
    if options.use_vllm_tokenizer:
        return text.CARD
    return {"prefill": prefill.CARD, "decode": decode.CARD}.get(options.role, aggregated.CARD)


def connector_of(options: WorkerOptions, engine_argv: Sequence[str]) -> Connector | None:
    return connectors.choose(options.connector, engine_flags(engine_argv).get("kv_transfer_config"))


def make_engine(
    options: WorkerOptions, settings: EngineSettings, on_load: OnLoad, on_phase: OnPhase
) -> TextEngine:
    if options.engine == "fake":
        from dynamo_vllm.engine.fake import FakeEngine, parse_spec

        return FakeEngine(parse_spec(options.fake_engine), on_load, on_phase)
    from dynamo_vllm.engine.vllm import VllmEngine

    return VllmEngine(settings, on_load, on_phase)


def engine_settings(
    options: WorkerOptions, engine_argv: Sequence[str], environment: Mapping[str, str], scratch: str
) -> EngineSettings:
    connector = connector_of(options, engine_argv)
    device = vllm_start.device() if options.engine == "vllm" else "none"
    place = Place(
        role=options.role,
        device=device,
        lease_seconds=options.kv_lease_seconds,
        offload_gb=options.kv_offload_gb or OFFLOAD_GB,
        environment=environment,
    )
    needs = connector.needs(place) if connector is not None else Needs()
    return EngineSettings(
        kv_transfer=(connector.engine_config(place) or None) if connector is not None else None,
        connector_environment=needs.environment,
        has_plain_blocks=connector is not None and connector.has_plain_blocks,
        connector_metrics_url=needs.metrics_url,
        merged_kv_events=needs.merged_events,
        side_channel_host=options.side_channel_host or options.bind_host,
        side_channel_port=options.side_channel_port,
        model=str(options.model),
        served_names=options.served_model_name,
        argv=tuple(engine_argv),
        headless=options.headless,
        reasoning_parser=options.reasoning_parser,
        direct_egress=options.direct_egress,
        publishes_kv_events=role_card(options).publishes_kv_events
        if options.kv_events is None
        else options.kv_events,
        kv_event_port=options.kv_event_port,
        scratch_folder=scratch,
        bind_host=options.bind_host,
        prometheus_folder=options.prometheus_multiproc_dir
        or (str(Path(scratch, "prometheus")) if needs.shares_metrics else None),
        environment=dict(environment),
    )


def make_role(
    options: WorkerOptions,
    facts: EngineFacts,
    engine: TextEngine,
    connector: Connector | None,
    meter: metrics.LoadMeter,
) -> Role[Any]:
    if options.use_vllm_tokenizer:
        template = options.custom_jinja_template
        return text.AggregatedText(
            facts,
            engine,
            (options.served_model_name or (str(options.model),))[0],
            Path(template).read_text() if template else None,
        )
    if options.role == "prefill":
        return prefill.Prefill(facts, connector, options.local_prefill_tokens or 0)
    if options.role == "decode":
        return decode.Decode(facts, connector, meter.count_lost_transfer)
    return aggregated.Aggregated(facts)


async def serve(
    options: WorkerOptions,
    drt: DistributedRuntime,
    engine: TextEngine,
    facts: EngineFacts,
    meter: metrics.LoadMeter,
    progress: Progress,
    connector: Connector | None,
    followers: lifeline.Followers,
) -> int:
    """Register, serve until a signal or the engine's death, leave; returns the exit code."""
    endpoint = drt.endpoint(options.address)
    role = make_role(options, facts, engine, connector, meter)
    in_flight = InFlight(engine)
    registration = Registration(endpoint, options, role.card, facts)
    lifecycle = Lifecycle(registration, drt, in_flight)
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def engine_died(exc: EngineDead) -> None:
        if not ending.done():
            logger.error("the engine is dead: %s", exc)
            ending.set_result(EXIT_ENGINE_DEAD)

    followers.lost.add_done_callback(lambda lost: engine_died(lost.result()))
    service = Service(role, engine, in_flight, engine_died)
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(endpoint)
    meter.connect(publisher, facts.total_kv_blocks, ranks(facts))
    endpoint.metrics.register_prometheus_expfmt_callback(
        lambda: engine.metrics_text() + metrics.exposition(meter, len(in_flight), registration.names[0])
    )
    dump(options, facts)
    progress.phase("warming")
    for rank in ranks(facts):
        await warm_up(engine, await small_job(role, facts, "warm-up", rank))
    settle()
    progress.phase("registering")
    if connector is not None and options.role in ("prefill", "decode"):
        peers = Peers(drt, options.address, registration.names[0], options.role, facts.terms)
        await peers.join()
    with events.publishers(endpoint, facts, options.enable_local_indexer) as publishers:
        await registration.publish()
        serving = asyncio.create_task(registration.serve(service.generate, role.health_check()))
        watching = asyncio.create_task(monitor(options, engine, role, facts, lifecycle).run())
        on_signals(ending, lambda: lifecycle.state is State.STOPPED)
        lifecycle.ready()
        followers.ready()
        progress.phase(
            "ready",
            models=list(registration.names),
            kv_event_publishers=publishers,
            instance=endpoint.connection_id(),
        )
        code = await first_ending(ending, serving, watching)
        await leave(options, lifecycle, drt, serving, watching, code)
    return code


def settle() -> None:
    """What is there now stays: the collector need not walk it again, which took a sixth of a busy worker."""
    gc.collect()
    gc.freeze()


async def warm_up(engine: Engine, job: Job) -> None:
    """One small request before anybody can send one: the first takes seconds on some machines."""
    await engine.stream(job, lambda _: None)


async def small_job(role: Role[Any], facts: EngineFacts, job_id: str, rank: int) -> Job:
    """The role's smallest job, for one rank."""
    job: Job = await role.prepare(role.parse(role.health_check()), job_id)
    return job if facts.data_parallel_size == 1 else dataclasses.replace(job, data_parallel_rank=rank)


def ranks(facts: EngineFacts) -> range:
    return range(facts.data_parallel_start_rank, facts.data_parallel_start_rank + facts.data_parallel_size)


def monitor(
    options: WorkerOptions, engine: Engine, role: Role[Any], facts: EngineFacts, lifecycle: Lifecycle
) -> Monitor:
    return Monitor(
        engine,
        functools.partial(small_job, role, facts),
        lifecycle.unwell,
        lifecycle.well,
        health_seconds=options.health_seconds,
        canary_seconds=options.canary_seconds,
        canary_timeout_seconds=options.canary_timeout_seconds,
    )


async def first_ending(
    ending: asyncio.Future[int], serving: asyncio.Task[None], watching: asyncio.Task[None]
) -> int:
    """Whatever comes first: a signal, a dead engine, the runtime going away."""
    every: list[asyncio.Future[Any]] = [ending, serving, watching]
    await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
    if ending.done():
        return ending.result()
    if watching.done():
        exc = watching.exception()
        if isinstance(exc, EngineDead):
            logger.error("the engine is dead: %s", exc)
            return EXIT_ENGINE_DEAD
        watching.result()
    serving.result()
    logger.error("the runtime stopped serving")
    return 1


async def leave(
    options: WorkerOptions,
    lifecycle: Lifecycle,
    drt: DistributedRuntime,
    serving: asyncio.Task[None],
    watching: asyncio.Task[None],
    code: int,
) -> None:
    """Drain (a dead engine has nothing to drain), then stop serving; bounded as a whole."""
    watching.cancel()
    await lifecycle.drain(options.drain_seconds if code == 0 else 0)
    drt.shutdown()
    await asyncio.wait({serving, watching}, timeout=SHUTDOWN_SECONDS)


async def close(engine: Engine, drt: DistributedRuntime) -> None:
    """Also after a failed start."""
    await engine.close()
    drt.shutdown()


def dump(options: WorkerOptions, facts: EngineFacts) -> None:
    if options.dump_config_to:
        found = {"options": dataclasses.asdict(options), "engine": dataclasses.asdict(facts)}
        Path(options.dump_config_to).write_text(json.dumps(found, indent=2, default=str) + "\n")
