"""Assembles a worker; the only file that knows everything."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import gc
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.llm import WorkerMetricsPublisher

from dynamo_vllm.admin.base import Controls, State
from dynamo_vllm.config import build, nodes, planes
from dynamo_vllm.config.encoders import folder_of
from dynamo_vllm.config.rules.flags import engine_flags
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.kv import events
from dynamo_vllm.lora.sources.store import cache_folder
from dynamo_vllm.serving import (
    adapters,
    admin,
    headless,
    keeper,
    lending,
    lifeline,
    metrics,
    parts,
    peers,
    runtime,
    scratch,
    system_port,
    tracing,
)
from dynamo_vllm.serving.admin import Admin
from dynamo_vllm.serving.cancel import InFlight
from dynamo_vllm.serving.ending import EXIT_ENGINE_DEAD, on_signals
from dynamo_vllm.serving.endpoints import Registration
from dynamo_vllm.serving.lifecycle import Lifecycle, Parts
from dynamo_vllm.serving.monitor import Monitor
from dynamo_vllm.serving.peers import Peers
from dynamo_vllm.serving.progress import Progress
from dynamo_vllm.serving.request import Service
from dynamo_vllm.serving.series import Exposition
from dynamo_vllm.serving.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.config.encoders import EncoderFolder
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.planes import EtcdAccess
    from dynamo_vllm.engine.base import Engine, TextEngine
    from dynamo_vllm.job import EngineFacts, Job
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.serving.runtime import Runtime
    from dynamo_vllm.serving.system_port import SystemPort
    from dynamo_vllm.serving.tracing import Tracing

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 25.0


async def run(
    options: WorkerOptions,
    engine_argv: Sequence[str],
    environment: Mapping[str, str],
    runtime_port: int | None = None,
) -> int:
    """The life of a worker, from options to exit code; the runtime's own server is at `runtime_port`."""
    progress = Progress(options.status_fd)
    node = nodes.of(options.headless, engine_flags(engine_argv))
    with scratch.folder() as scratch_folder:
        drt = runtime.alone() if node.is_headless else joined(options, engine_argv)
        named = options.model
        options = await parts.with_local_model(options, progress)
        options = parts.with_media_template(options, scratch_folder)
        settings = parts.engine_settings(options, engine_argv, environment, scratch_folder)
        settings = dataclasses.replace(settings, is_local=options.model == named)
        if settings.prometheus_folder:
            os.makedirs(settings.prometheus_folder, exist_ok=True)
        if node.is_headless:
            return await headless.run(settings, drt, progress)
        meter = metrics.LoadMeter()
        engine = parts.make_engine(options, settings, meter.record, progress.phase)
        with system_port.opened(options, runtime_port) as front:
            try:
                async with lifeline.followers(node) as followers:
                    facts = await engine.start()
                    started = Started(
                        options=options,
                        drt=drt,
                        engine=engine,
                        facts=facts,
                        meter=meter,
                        progress=progress,
                        connector=parts.connector_of(options, engine_argv),
                        encoder_folder=folder_of(options, engine_flags(engine_argv)),
                        followers=followers,
                        front=front,
                        adapter_cache=cache_folder(options.lora_path, environment),
                        etcd=planes.etcd_access(options, environment),
                        scratch_folder=scratch_folder,
                    )
                    with tracing.opened(options, started.model) as traces:
                        async with parts.media_loader(options, facts, engine) as loader:
                            return await serve(started, loader, traces)
            finally:
                await close(engine, drt)


def joined(options: WorkerOptions, engine_argv: Sequence[str]) -> Runtime:
    """The runtime with every endpoint this worker may serve or ask."""
    addresses = [options.address, *admin.handled(options.address)]
    if options.role in ("prefill", "decode"):
        addresses.append(peers.endpoint_of(options.address))
    if folder_of(options, engine_flags(engine_argv)) is not None:
        addresses += [*parts.encoders_of(options), lending.endpoint_of(options.address)]
    return runtime.Runtime(runtime.create(options), addresses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker whose engine runs."""

    options: WorkerOptions
    drt: Runtime
    engine: TextEngine
    facts: EngineFacts
    meter: metrics.LoadMeter
    progress: Progress
    connector: Connector | None
    encoder_folder: EncoderFolder | None
    followers: lifeline.Followers
    front: SystemPort | None
    adapter_cache: Path
    etcd: EtcdAccess | None
    scratch_folder: str

    @property
    def model(self) -> str:
        """The name clients know it by."""
        return (self.options.served_model_name or (str(self.options.model),))[0]

    @property
    def folders(self) -> dict[str, str]:
        """What this worker writes to, by what it is for."""
        found = {"scratch": self.scratch_folder}
        if self.encoder_folder is not None:
            found["encodings"] = self.encoder_folder.path
        if self.facts.adapters is not None:
            found["adapters"] = str(self.adapter_cache)
        return found


async def serve(started: Started, loader: MediaLoader | None = None, traces: Tracing | None = None) -> int:
    """Register, serve until a signal or the engine's death, leave; returns the exit code."""
    options, drt, engine, facts = started.options, started.drt, started.engine, started.facts
    meter, progress = started.meter, started.progress
    endpoint = drt.endpoint(options.address)
    folder = started.encoder_folder
    reader = await parts.media_reader(options, folder, facts, engine, loader, drt, meter.count_lost_encoding)
    role = parts.make_role(
        options, facts, engine, started.connector, meter.count_lost_transfer, reader, folder
    )
    if options.role == "encode" and options.encoder_transfer == "nixl" and folder is not None:
        lending.Lender(parts.encoded_folder(folder, facts), lending.Nixl()).serve(drt, options.address)
    in_flight = InFlight(engine)
    registration = Registration(endpoint, options, role.card, facts)
    registry = await adapters.make_registry(options, started.adapter_cache, facts, engine, registration)
    answers = functools.partial(warm_up, engine, role, facts)
    lifecycle = Lifecycle(
        Parts(
            discovery=registration,
            health=drt,
            in_flight=in_flight,
            engine=engine,
            adapters=registry or adapters.NONE,
            answers=answers,
            sleep_refusal=facts.sleep_refusal,
        )
    )
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def engine_died(exc: EngineDead) -> None:
        if not ending.done():
            logger.error("the engine is dead: %s", exc)
            ending.set_result(EXIT_ENGINE_DEAD)

    started.followers.lost.add_done_callback(lambda lost: engine_died(lost.result()))
    last_error = metrics.LastError()
    service = Service(
        role,
        engine,
        in_flight,
        engine_died,
        registry,
        last_error.note,
        traces.headers if traces is not None else None,
    )
    generate = traces.around(service.generate) if traces is not None else service.generate
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(endpoint)
    meter.connect(publisher, facts.total_kv_blocks, ranks(facts))
    exposition = Exposition(
        model=registration.names[0],
        role=options.role,
        meter=meter,
        in_flight=lambda: len(in_flight),
        life=lifecycle,
        adapters=registry,
        folders=started.folders,
    )
    endpoint.metrics.register_prometheus_expfmt_callback(lambda: engine.metrics_text() + exposition.text())
    dump(options, facts)
    progress.phase("warming")
    await answers()
    settle()
    progress.phase("registering")
    if started.connector is not None and options.role in ("prefill", "decode"):
        await Peers(drt, options.address, registration.names[0], options.role, facts.terms).join()
    with events.publishers(endpoint, facts, options.enable_local_indexer, str(options.model)) as publishers:
        exposition.kv_event_publishers = publishers
        await registration.publish()
        serving = asyncio.create_task(registration.serve(generate, role.health_check()))
        await adapters.load_first(registry, options.lora_modules, progress.phase)
        watching = asyncio.create_task(monitor(options, engine, role, facts, lifecycle).run())
        keeping = asyncio.create_task(keeper.keep(started.etcd, endpoint.connection_id()))
        on_signals(ending, lambda: lifecycle.state is State.STOPPED)
        instance = endpoint.connection_id()
        status = Status(options, facts, instance, registration.names, meter, in_flight, last_error)
        open_to_operators(started, lifecycle, registry, status, engine_died)
        lifecycle.ready()
        started.followers.ready()
        progress.phase(
            "ready",
            models=list(registration.names),
            kv_event_publishers=publishers,
            instance=instance,
        )
        code = await first_ending(ending, serving, watching)
        keeping.cancel()  # before the lease is given back
        await leave(options, lifecycle, drt, serving, watching, code)
    return code


def open_to_operators(
    started: Started,
    lifecycle: Lifecycle,
    registry: Registry | None,
    status: Status,
    on_dead: Callable[[EngineDead], None],
) -> None:
    """Admin verbs over the runtime, and over HTTP where there is a system port."""
    options = started.options
    controls = Controls(
        life=lifecycle,
        engine=started.engine,
        facts=started.facts,
        adapters=registry,
        drain_seconds=options.drain_seconds,
        status=lambda: status.reply(lifecycle.state, registry),
    )
    performer = Admin(controls, options.admin_token, on_dead)
    performer.serve(started.drt, options.address)
    if started.front is not None:
        started.front.admin = performer


def settle() -> None:
    """What is there now stays: the collector need not walk it again, which took a sixth of a busy worker."""
    gc.collect()
    gc.freeze()


async def warm_up(engine: Engine, role: Role[Any], facts: EngineFacts) -> None:
    """One small request to each rank before anybody sends one: the first takes seconds on some machines."""
    for rank in ranks(facts):
        await engine.stream(await small_job(role, facts, "warm-up", rank), lambda _: None)


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
        lambda: lifecycle.is_watched,
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
    drt: Runtime,
    serving: asyncio.Task[None],
    watching: asyncio.Task[None],
    code: int,
) -> None:
    """Drain (a dead engine has nothing to drain), then stop serving; bounded as a whole."""
    watching.cancel()
    await lifecycle.drain(options.drain_seconds if code == 0 else 0)
    drt.shutdown()
    await asyncio.wait({serving, watching}, timeout=SHUTDOWN_SECONDS)


async def close(engine: Engine, drt: Runtime) -> None:
    """Also after a failed start."""
    await engine.close()
    drt.shutdown()


def dump(options: WorkerOptions, facts: EngineFacts) -> None:
    if options.dump_config_to:
        found = {"options": build.shown(options), "engine": dataclasses.asdict(facts)}
        Path(options.dump_config_to).write_text(json.dumps(found, indent=2, default=str) + "\n")
