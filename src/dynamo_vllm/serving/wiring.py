"""Connects a started engine to the parts that serve it: role, registration, lifecycle, metrics, admin."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.llm import WorkerMetricsPublisher

from dynamo_vllm.admin.base import Controls
from dynamo_vllm.config.encoders import EncoderFolder
from dynamo_vllm.roles import pooling
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.serving import factories
from dynamo_vllm.serving.admin import adapters
from dynamo_vllm.serving.admin.endpoint import Admin
from dynamo_vllm.serving.admin.status import WorkerStatus
from dynamo_vllm.serving.calls.card import card_of
from dynamo_vllm.serving.encoding import transfer as encoding_transfer
from dynamo_vllm.serving.encoding.output import encoded_folder
from dynamo_vllm.serving.lifecycle.monitor import Monitor
from dynamo_vllm.serving.lifecycle.operations import BoundedOperations
from dynamo_vllm.serving.lifecycle.states import Lifecycle, LifeParts
from dynamo_vllm.serving.lifecycle.warmup import Warming
from dynamo_vllm.serving.metrics.series import Exposition
from dynamo_vllm.serving.plane.prefill_done import prefill_done
from dynamo_vllm.serving.plane.registration import Registration
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.crash_notes import CrashNotes
from dynamo_vllm.serving.request.egress import Egress
from dynamo_vllm.serving.request.pace import Pace
from dynamo_vllm.serving.request.service import Service, answering_probes
from dynamo_vllm.serving.tokens.endpoint import TokenService
from dynamo_vllm.serving.usage import record
from dynamo_vllm.serving.usage.meter import Meter
from dynamo_vllm.serving.usage.reporter import Reporter
from dynamo_vllm.serving.usage.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo.runtime import Endpoint

    from dynamo_vllm.config.encoders import EncoderOutput
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.planes import EtcdAccess
    from dynamo_vllm.engine.base import Engine
    from dynamo_vllm.errors import EngineDead
    from dynamo_vllm.job import EngineFacts, Job
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.lora.registry import Registry
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.serving.lifecycle import node_link
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.metrics import load_meter
    from dynamo_vllm.serving.plane.runtime import Runtime
    from dynamo_vllm.serving.request.tracing import Generate, Tracing
    from dynamo_vllm.serving.system_port.handler import SystemPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker whose engine runs."""

    options: WorkerOptions
    drt: Runtime
    engine: Engine
    meter: load_meter.LoadMeter
    progress: Progress
    connector: Connector | None
    encoder_output: EncoderOutput | None
    followers: node_link.Followers
    front: SystemPort | None
    adapter_cache: Path
    etcd: EtcdAccess | None
    scratch_folder: str
    usage_folder: Path

    @property
    def facts(self) -> EngineFacts:
        return self.engine.facts

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint where it serves requests."""
        return self.drt.endpoint(self.options.address)

    @property
    def model(self) -> str:
        """The name that clients use."""
        return (self.options.served_model_name or (str(self.options.model),))[0]

    @property
    def folders(self) -> dict[str, str]:
        """The folders that this worker writes to, by purpose."""
        found = {"scratch": self.scratch_folder}
        if isinstance(self.encoder_output, EncoderFolder):
            found["encodings"] = self.encoder_output.path
        if self.facts.adapters is not None:
            found["adapters"] = str(self.adapter_cache)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembled:
    """The parts that requests, operators and the lifecycle share."""

    role: Role[Any]
    in_flight: InFlight
    operations: BoundedOperations
    registration: Registration
    registry: Registry | None
    lifecycle: Lifecycle
    answers: Callable[[], Awaitable[None]]
    """Raise if the engine does not answer."""
    warming: Warming
    crash_notes: CrashNotes
    reporter: Reporter


async def assemble(
    started: Started, loader: MediaLoader | None, on_dead: Callable[[EngineDead], None]
) -> Assembled:
    options, drt, engine, facts = started.options, started.drt, started.engine, started.facts
    meter, output = started.meter, started.encoder_output
    reader = await factories.media_reader(options, output, engine, loader, drt, meter.count_lost_encoding)
    role = factories.make_role(
        options, engine, started.connector, meter.count_lost_transfer, reader, output, loader
    )
    over_nixl = role.card.encodes_media and options.encoder_transfer == "nixl"
    if over_nixl and isinstance(output, EncoderFolder):
        encoded = encoded_folder(output, facts)
        encoding_transfer.TransferServer(encoded, encoding_transfer.NixlAgent()).serve(drt, options.address)
    in_flight = InFlight(engine)
    in_flight.tell_router = await prefill_done(started.endpoint, role.card.worker_type)
    registration = Registration(started.endpoint, options, role.card, facts, started.scratch_folder)
    operations = BoundedOperations(engine, on_dead)
    registry = await adapters.make_registry(options, started.adapter_cache, facts, operations, registration)
    answers = functools.partial(warm_up, engine, role)
    lifecycle = Lifecycle(
        LifeParts(
            discovery=registration,
            health=drt,
            in_flight=in_flight,
            engine=operations,
            adapters=registry or adapters.NONE,
            answers=answers,
            sleep_refusal=facts.sleep_refusal,
        )
    )
    return Assembled(
        warming=warming(started, role, loader, operations),
        role=role,
        in_flight=in_flight,
        operations=operations,
        registration=registration,
        registry=registry,
        lifecycle=lifecycle,
        answers=answers,
        crash_notes=CrashNotes(options.crash_notes),
        reporter=Reporter(drt.endpoint(gateways_of(options)), Spool(started.usage_folder)),
    )


def gateways_of(options: WorkerOptions) -> str:
    """Return the address where gateways take the token counts of requests."""
    return f"{options.namespace}.{record.ENDPOINT}"


def warming(
    started: Started, role: Role[object], loader: MediaLoader | None, operations: BoundedOperations
) -> Warming:
    """Call no encode worker: a role that would do so is built again without it."""
    options, engine, facts, output = started.options, started.engine, started.facts, started.encoder_output
    if loader is not None and output is not None and not role.card.encodes_media:
        own = MediaReader(facts, loader, engine.parts.media)
        role = factories.make_role(options, engine, started.connector, lambda: None, own, output)
    return Warming(
        engine=engine,
        operations=operations,
        role=role,
        on_phase=started.progress.phase,
        takes_media=loader is not None,
        adapter_base=Path(str(options.model)),
        scratch=Path(started.scratch_folder),
    )


def answering(
    started: Started,
    made: Assembled,
    on_dead: Callable[[EngineDead], None],
    last_error: load_meter.LastError,
    traces: Tracing | None,
) -> Generate:
    """Return the function that the endpoint calls for each request."""
    service = Service(
        made.role,
        started.engine,
        made.in_flight,
        on_dead,
        made.registry,
        last_error.note,
        traces.headers if traces is not None else None,
        egress=Egress(round(started.options.unread_mb * 1e6), started.meter.count_unread_answer),
        pace=Pace(started.options.messages_per_second),
        crash_notes=made.crash_notes,
        meter=Meter(made.reporter, started.model, only_prompts=made.role.card.gives_kv),
    )
    generate = traces.around(service.generate) if traces is not None else service.generate
    if not started.options.runtime_health_check:
        return generate
    return answering_probes(generate, started.options.canary_timeout_seconds)


async def expose(started: Started, made: Assembled) -> Exposition:
    """Load figures for the router, and metrics for /metrics."""
    engine, facts = started.engine, started.facts
    publisher = WorkerMetricsPublisher()
    await publisher.create_endpoint(started.endpoint)
    started.meter.connect(publisher, facts.total_kv_blocks, ranks(facts))
    exposition = Exposition(
        model=made.registration.names[0],
        role=started.options.role,
        meter=started.meter,
        in_flight=lambda: len(made.in_flight),
        life=made.lifecycle,
        adapters=made.registry,
        folders=started.folders,
        tiers=engine.parts.tiers,
    )
    started.endpoint.metrics.register_prometheus_expfmt_callback(
        lambda: engine.metrics_text() + exposition.text()
    )
    return exposition


def open_to_operators(
    started: Started, made: Assembled, last_error: load_meter.LastError, on_dead: Callable[[EngineDead], None]
) -> None:
    """Admin verbs over the runtime, and over HTTP if there is a system port."""
    options, facts = started.options, started.facts
    instance, names = started.endpoint.connection_id(), made.registration.names
    tiers = started.engine.parts.tiers
    status = WorkerStatus(options, facts, instance, names, started.meter, made.in_flight, last_error, tiers)
    controls = Controls(
        life=made.lifecycle,
        engine=made.operations,
        facts=facts,
        adapters=made.registry,
        tiers=tiers,
        drain_seconds=options.drain_seconds,
        status=lambda: status.reply(made.lifecycle.state, made.registry),
    )
    performer = Admin(controls, options.admin_token, on_dead)
    performer.serve(started.drt, options.address)
    if started.front is not None:
        started.front.admin = performer
        started.front.watch_loop()


def convert_tokens(started: Started, made: Assembled) -> None:
    """Say what this worker is for, and tokenise for others if the engine can."""
    tokens, template = started.engine.parts.tokens, started.options.custom_jinja_template
    pools, address = started.facts.pooling, started.options.address
    apis = made.registration.endpoint_types if pools is None else pooling.apis(pools)
    card = card_of(made.role.card, started.facts, apis, address, started.endpoint.connection_id())

    def names() -> list[str]:
        adapters = made.registry.entries() if made.registry is not None else []
        return [*made.registration.names, *(entry.name for entry in adapters)]

    length = started.facts.context_length
    service = TokenService(tokens, names, length, Path(template).read_text() if template else None, card)
    service.serve(started.drt, started.options.address)


async def warm_up(engine: Engine, role: Role[object]) -> None:
    """Send one small request to each rank."""
    for rank in ranks(engine.facts):
        await engine.stream(await small_job(role, engine.facts, "warm-up", rank), lambda _: None)


async def small_job(role: Role[object], facts: EngineFacts, job_id: str, rank: int) -> Job:
    """Return the role's smallest job for one rank."""
    job: Job = await role.prepare(role.parse(role.health_check()), job_id)
    return job if facts.data_parallel_size == 1 else dataclasses.replace(job, data_parallel_rank=rank)


def ranks(facts: EngineFacts) -> range:
    return range(facts.data_parallel_start_rank, facts.data_parallel_start_rank + facts.data_parallel_size)


def monitor(started: Started, made: Assembled) -> Monitor:
    options, lifecycle = started.options, made.lifecycle
    return Monitor(
        started.engine,
        functools.partial(small_job, made.role, started.facts),
        lifecycle.unwell,
        lifecycle.well,
        lambda: lifecycle.is_watched,
        health_seconds=options.health_seconds,
        canary_seconds=options.canary_seconds,
        canary_timeout_seconds=options.canary_timeout_seconds,
        step_seconds=options.step_seconds,
    )
