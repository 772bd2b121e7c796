"""Runs a worker, from its options to its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_vllm import host_memory
from dynamo_vllm.admin.base import WorkerState
from dynamo_vllm.config import build, folders, planes
from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.vllm.compat import versions
from dynamo_vllm.errors import EngineDead
from dynamo_vllm.kv import events
from dynamo_vllm.lora.sources.store import cache_folder
from dynamo_vllm.serving import factories, launchers, scratch, wiring
from dynamo_vllm.serving.admin import adapters
from dynamo_vllm.serving.admin import endpoint as admin_endpoint
from dynamo_vllm.serving.admin.config_dump import Dump
from dynamo_vllm.serving.encoding import transfer as encoding_transfer
from dynamo_vllm.serving.encoding.output import warn_of_other_connector
from dynamo_vllm.serving.lifecycle import headless, node_link, warmup
from dynamo_vllm.serving.lifecycle.progress import Progress
from dynamo_vllm.serving.lifecycle.shutdown import EXIT_ENGINE_DEAD, close_engine, on_dead_engine, on_signals
from dynamo_vllm.serving.metrics import load_meter
from dynamo_vllm.serving.plane import etcd_lease, inotify, kv_compatibility, parsers, runtime, socket_options
from dynamo_vllm.serving.request import tracing
from dynamo_vllm.serving.system_port import handler as system_port_handler
from dynamo_vllm.serving.tokens import address as tokens_address
from dynamo_vllm.serving.wiring import Started

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.worker_plan import WorkerPlan
    from dynamo_vllm.forking import Zygote
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.serving.lifecycle.states import Lifecycle
    from dynamo_vllm.serving.plane.registration import Registration
    from dynamo_vllm.serving.plane.runtime import Runtime
    from dynamo_vllm.serving.request.tracing import Tracing
    from dynamo_vllm.serving.usage.reporter import Reporter
    from dynamo_vllm.serving.wiring import Assembled

logger = logging.getLogger(__name__)
SHUTDOWN_SECONDS = 5.0
"""Time after the drain for the runtime's last data: it waits for clients that do not read. Less than `serve`
and Kubernetes allow besides the drain, because the engine must end too."""


def refuse(options: WorkerOptions) -> None:
    """Check what is quickly found, before anything slow."""
    if options.engine == "vllm":
        machine.refuse_missing_library()
        versions.refuse_older()
    parsers.refuse_unknown(options)
    factories.refuse_missing_folder(str(options.model))


async def run(
    plan: WorkerPlan,
    environment: Mapping[str, str],
    runtime_port: int | None = None,
    progress: Progress | None = None,
    zygote: Zygote | None = None,
) -> int:
    """Run a worker and return its exit code; the runtime's own server is at `runtime_port`.

    Its engine cores are forked from the `zygote`, if there is one.
    """
    options, node = plan.options, plan.node
    progress = progress or Progress(options.status_fd)
    dumped = Dump(options.dump_config_to)
    dumped.add("options", build.without_secrets(options))
    dumped.add("engine_flags", plan.flags)
    own_ports = (options.system_port, runtime_port) if options.system_host else ()
    # If there are other nodes, they must be able to reach this one.
    kept_host = options.bind_host if node.leader in LOOPBACK_HOSTS else None
    with (
        scratch.folder() as scratch_folder,
        own_metrics_folder(options) as options,
        socket_options.restricted_to_loopback(kept_host, own_ports),
        named_host_memory(options) as engine_id,
    ):
        plan = plan.with_options(options)
        drt = runtime.alone() if node.is_headless else joined(plan)
        options = await factories.with_local_model(plan, environment, progress)
        options = factories.with_media_template(options, scratch_folder)
        plan = plan.with_options(options)
        dumped.add("options", build.without_secrets(options))
        warn_of_other_connector(plan)
        await factories.warn_of_disk(plan.options)
        settings = factories.engine_settings(plan, environment, scratch_folder, engine_id)
        settings = dataclasses.replace(
            settings, on_resolved=functools.partial(dumped.add, "vllm"), zygote=zygote
        )
        if settings.prometheus_folder:
            os.makedirs(settings.prometheus_folder, exist_ok=True)
        if node.is_headless:
            return await headless.run(settings, drt, progress, options.admin_token)
        meter = load_meter.LoadMeter()
        launch = launchers.launcher(options, settings)
        with system_port_handler.opened(options, runtime_port) as front:
            async with contextlib.AsyncExitStack() as ends:
                ends.callback(drt.shutdown)
                async with node_link.followers(node, options.admin_token, options.node_peers) as followers:
                    engine = await launch(meter.record, progress.phase)
                    ends.push_async_callback(close_engine, engine)
                    dumped.add("engine", engine.facts)
                    options = factories.with_audio_check(options, engine.facts, scratch_folder)
                    started = Started(
                        options=options,
                        drt=drt,
                        engine=engine,
                        meter=meter,
                        progress=progress,
                        connector=factories.connector_of(plan),
                        encoder_output=plan.encoder_output,
                        followers=followers,
                        front=front,
                        adapter_cache=cache_folder(options.lora_path, environment),
                        etcd=planes.etcd_access(options, environment),
                        scratch_folder=scratch_folder,
                        usage_folder=Path(options.usage_dir or folders.data(environment) / "usage"),
                    )
                    with tracing.opened(options, started.model) as traces:
                        async with factories.media_loader(options, engine.parts.media) as loader:
                            return await serve(started, loader, traces)


def named_host_memory(options: WorkerOptions) -> contextlib.AbstractContextManager[str | None]:
    """Yield the id of an engine with KV caches in host memory, which does not outlive this worker."""
    return host_memory.new_engine_id() if factories.has_host_memory(options) else contextlib.nullcontext()


@contextlib.contextmanager
def own_metrics_folder(options: WorkerOptions) -> Iterator[WorkerOptions]:
    """Yield the options with a new folder in the one for metrics that the user named.

    Who reads such a folder shows all series in it, also those of other workers and of earlier runs.
    """
    if not options.prometheus_multiproc_dir:
        yield options
        return
    with scratch.folder(options.prometheus_multiproc_dir) as made:
        yield dataclasses.replace(options, prometheus_multiproc_dir=made)


def joined(plan: WorkerPlan) -> Runtime:
    """Create the runtime with every endpoint this worker may serve or call."""
    options = plan.options
    addresses = [options.address, *admin_endpoint.handled(options.address), wiring.gateways_of(options)]
    addresses.append(tokens_address.endpoint_of(options.address))
    if factories.role_card(options).hands_over_kv:
        addresses.append(kv_compatibility.endpoint_of(options.address))
    if plan.encoder_output is not None:
        addresses += [*factories.encoders_of(options), encoding_transfer.endpoint_of(options.address)]
    return runtime.Runtime(runtime.create(options, inotify.WORKER), addresses)


async def serve(started: Started, loader: MediaLoader | None = None, traces: Tracing | None = None) -> int:
    """Register, serve until a signal or the engine's death, leave; return the exit code."""
    options, progress, endpoint = started.options, started.progress, started.endpoint
    ending: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    engine_died = on_dead_engine(ending)
    made = await wiring.assemble(started, loader, engine_died)
    registration, lifecycle = made.registration, made.lifecycle
    started.followers.lost.add_done_callback(lambda lost: engine_died(lost.result()))
    last_error = load_meter.LastError()
    generate = wiring.answering(started, made, engine_died, last_error, traces)
    exposition = await wiring.expose(started, made)
    await warm(started, made)
    started.drt.refuse_unlisted()  # before requests come: it has to start again
    await join_peers(started, registration)
    with events.publishers(
        endpoint, started.facts, options.enable_local_indexer, str(options.model)
    ) as publishers:
        exposition.kv_event_publishers = publishers
        await registration.publish()
        # Requests arrive from here on, before the first adapters are loaded: whatever ends them is noticed.
        on_signals(ending, lambda: lifecycle.state is WorkerState.STOPPED)
        watching = asyncio.create_task(wiring.monitor(started, made).run())
        instance = endpoint.connection_id()
        keeping = asyncio.create_task(etcd_lease.keep(started.etcd, options.discovery_folder, instance))
        serving = asyncio.create_task(registration.serve(generate, made.role.health_check()))
        made.reporter.start()

        async def open_up() -> None:
            wiring.convert_tokens(started, made)  # first: frontends list the model, so others may call it
            await adapters.load_first(made.registry, options.lora_modules, progress.phase)
            wiring.open_to_operators(started, made, last_error, engine_died)
            lifecycle.ready()
            started.followers.ready()
            progress.phase(
                "ready",
                models=list(registration.names),
                endpoint_types=list(registration.endpoint_types),
                kv_event_publishers=publishers,
                instance=instance,
            )

        opening = asyncio.create_task(open_up())
        code = 1
        try:
            code = await first_ending(ending, serving, watching, opening, started.drt.unlisted)
        finally:
            opening.cancel()
            keeping.cancel()  # before the lease is given back
            if code == EXIT_ENGINE_DEAD:
                made.crash_notes.died()
            await leave(options, lifecycle, started.drt, serving, watching, code, made.reporter)
            await etcd_lease.give_back(started.etcd, instance)
    return code


async def warm(started: Started, made: Assembled) -> None:
    """Warm up before anybody sends a request: the first of each kind takes seconds on some machines."""
    started.progress.phase("warming")
    with started.engine.counting.paused():
        await made.answers()
        if started.facts.builds_lazily and started.options.warm_up:
            made.registration.prompt_tokens_per_second = await warmup.warm_up(made.warming)
    settle()


async def join_peers(started: Started, registration: Registration) -> None:
    options = started.options
    started.progress.phase("registering")
    if started.connector is not None and factories.role_card(options).hands_over_kv:
        terms = started.facts.terms
        await kv_compatibility.Peers(
            started.drt, options.address, registration.names[0], options.role, terms
        ).join()


def settle() -> None:
    """Exclude current objects from garbage collection, which took a sixth of a busy worker's time."""
    gc.collect()
    gc.freeze()


async def first_ending(
    ending: asyncio.Future[int],
    serving: asyncio.Task[None],
    watching: asyncio.Task[None],
    opening: asyncio.Task[None],
    unlisted: asyncio.Future[None],
) -> int:
    """Wait for the first of: a signal, a dead engine, the end of the runtime, adapters that do not load, an
    endpoint that discovery does not take.
    """
    every: list[asyncio.Future[Any]] = [ending, serving, watching, unlisted]
    await asyncio.wait([*every, opening], return_when=asyncio.FIRST_COMPLETED)
    if opening.done() and opening.exception() is None:
        await asyncio.wait(every, return_when=asyncio.FIRST_COMPLETED)
    if ending.done():
        return ending.result()
    for task in (watching, opening, unlisted):
        if task.done() and (exc := task.exception()) is not None:
            if not isinstance(exc, EngineDead):
                raise exc
            logger.error("the engine is dead: %s", exc)
            return EXIT_ENGINE_DEAD
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
    reporter: Reporter,
) -> None:
    """Drain (a dead engine has nothing to drain), then stop serving; limited as a whole."""
    watching.cancel()
    if code == 0:
        await lifecycle.drain(options.drain_seconds)
    else:  # late callers are better served elsewhere
        await lifecycle.drain(0, settles=False)
    await reporter.close()
    drt.shutdown()
    await asyncio.wait({serving, watching}, timeout=SHUTDOWN_SECONDS)
