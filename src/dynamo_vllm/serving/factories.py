"""Creates the parts of a worker from its options: engine, settings, role, connector, adapters."""

from __future__ import annotations

import dataclasses
import logging
import os
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.llm import fetch_model

from dynamo_vllm.codec.pipeline import Bounds
from dynamo_vllm.config.encoders import EncoderFolder, OtherConnector
from dynamo_vllm.config.options.kv_cache import OFFLOAD_GB
from dynamo_vllm.config.rules.kv_tiers import disk_warning
from dynamo_vllm.config.worker_plan import TIERS
from dynamo_vllm.engine import machine
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.errors import StartError
from dynamo_vllm.kv import connectors, model_identity
from dynamo_vllm.kv.connectors.base import ConnectorPlace, Needs
from dynamo_vllm.models import hub, media_template
from dynamo_vllm.roles import aggregated, omni, table, text
from dynamo_vllm.roles.encoded import EncodedReader, kinds_encoded_here
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.serving.encoding import transfer as encoding_transfer
from dynamo_vllm.serving.encoding.encode_workers import EncodeWorkers
from dynamo_vllm.serving.encoding.output import ec_transfer, encoded_folder
from dynamo_vllm.serving.encoding.pixels import FrontendPixels
from dynamo_vllm.serving.plane.address import own_address
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime, when_not_busy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

    from dynamo_vllm.config.encoders import EncoderOutput
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.config.worker_plan import WorkerPlan
    from dynamo_vllm.engine.base import Engine, MediaProcessor
    from dynamo_vllm.job import EngineFacts
    from dynamo_vllm.kv.connectors.base import Connector
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.roles.base import Role
    from dynamo_vllm.roles.media import Reader
    from dynamo_vllm.serving.lifecycle.progress import Progress
    from dynamo_vllm.serving.plane.runtime import Runtime

logger = logging.getLogger(__name__)


async def with_local_model(
    plan: WorkerPlan, environment: Mapping[str, str], progress: Progress
) -> WorkerOptions:
    """Return the options with the model as a folder; a hub id is downloaded and stays the served name."""
    options, flags = plan.options, plan.flags
    model = str(options.model)
    if os.path.isdir(model):  # noqa: ASYNC240  # nothing else runs yet
        return options
    refuse_missing_folder(model)
    progress.phase("fetching", model=model)
    wanted = hub.Wanted(
        model=model,
        revision=flags.get("revision"),
        download_dir=flags.get("download_dir"),
        token=flags.get("hf_token"),
        load_format=flags.get("load_format") or "auto",
        whole=options.omni,
    )
    if environment.get("MODEL_EXPRESS_URL") and not (wanted.revision or wanted.download_dir):
        folder = await _of_model_express(model)
    else:
        folder = str(await in_thread(lambda: hub.fetch(wanted)))
    return dataclasses.replace(options, model=folder, served_model_name=options.served_model_name or (model,))


def refuse_missing_folder(model: str) -> None:
    if model.startswith(("/", ".", "~")) and not os.path.isdir(model):
        raise StartError(f"--model {model}: there is no such folder")


async def _of_model_express(model: str) -> str:
    """Use the runtime's model server, and the hub if that does not answer."""
    try:
        with of_runtime():
            found = await fetch_model(model)
    except RuntimeFailed as exc:
        raise StartError(
            f"--model {model}: not a folder, and the hub does not give it: {exc}. "
            "Check the name and the network, or give a local folder"
        ) from exc
    return str(found)


def with_media_template(options: WorkerOptions, scratch: str) -> WorkerOptions:
    """Return the options with `--mm-prompt-template` as a template file."""
    if options.mm_prompt_template is None:
        return options
    path = Path(scratch, "media-template.jinja")
    path.write_text(media_template.jinja(options.mm_prompt_template))
    return dataclasses.replace(options, custom_jinja_template=str(path))


def with_audio_check(options: WorkerOptions, facts: EngineFacts, scratch: str) -> WorkerOptions:
    """Return the options with a template that renders a chat with `input_audio` as an empty prompt.

    The frontend drops these parts, and the client would get an answer that ignores them. The role refuses an
    empty prompt. A chat template is part of the model card, so all workers of a model must have the same.
    """
    if options.use_vllm_tokenizer or facts.speech is not None or not facts.media.get("audio"):
        return options
    own = options.custom_jinja_template
    template = Path(own).read_text() if own else media_template.of_model(Path(str(options.model)))
    if template is None:
        logger.warning(
            "the frontend drops input_audio, and %s has no single chat template to detect that: clients that "
            "send it get answers without their audio; give a template with --custom-jinja-template, or start "
            "with --use-vllm-tokenizer",
            options.model,
        )
        return options
    path = Path(scratch, "audio-template.jinja")
    path.write_text(media_template.without_input_audio(template))
    return dataclasses.replace(options, custom_jinja_template=str(path))


def role_card(options: WorkerOptions) -> RoleCard:
    return text.CARD if options.use_vllm_tokenizer else options.card


def connector_of(plan: WorkerPlan) -> Connector | None:
    return connectors.choose(plan.options.connector, plan.flags.get("kv_transfer_config"))


async def warn_of_disk(options: WorkerOptions) -> None:
    disk = options.kv_disk
    if disk is None or options.engine == "fake":
        return
    if said := await in_thread(lambda: disk_warning(disk)):
        logger.warning(said)


def connector_place(plan: WorkerPlan, environment: Mapping[str, str]) -> ConnectorPlace:
    options = plan.options
    has_engine = options.engine == "vllm"
    disk = options.kv_disk if has_engine else None
    return ConnectorPlace(
        role=options.role,
        device=machine.device() if has_engine else "none",
        lease_seconds=options.kv_lease_seconds,
        offload_gb=options.kv_offload_gb or OFFLOAD_GB,
        disk=disk,
        ranks=plan.node.local_ranks,
        identity=model_identity.identity(str(options.model), plan.flags, environment) if disk else "",
        environment=environment,
    )


def has_host_memory(options: WorkerOptions) -> bool:
    """Return whether the engine keeps KV caches in host memory with our connector."""
    return TIERS in options.connector and options.engine == "vllm"


def engine_settings(
    plan: WorkerPlan, environment: Mapping[str, str], scratch: str, engine_id: str | None = None
) -> EngineSettings:
    """Return what the engine is started with; vLLM chooses the id of its KV transfer if there is none."""
    options, output, card = plan.options, plan.encoder_output, role_card(plan.options)
    folder = output if isinstance(output, EncoderFolder) else None
    connector = connector_of(plan)
    place = connector_place(plan, environment)
    needs = connector.needs(place) if connector is not None else Needs()
    kv_transfer = (connector.engine_config(place) or None) if connector is not None else None
    if kv_transfer is not None and engine_id is not None:
        kv_transfer = {**kv_transfer, "engine_id": engine_id}
    return EngineSettings(
        kv_transfer=kv_transfer,
        host_tier_bytes=int(place.offload_gb * 10**9) if TIERS in options.connector else 0,
        ec_transfer=ec_transfer(output),
        encoder_folder=folder.path if folder else None,
        encoder_folder_bytes=folder.max_bytes if folder else 0,
        takes_encoded=folder is not None and folder.connector_role is None,
        connector_environment=needs.environment,
        has_plain_blocks=connector is not None and connector.has_plain_blocks,
        connector_metrics_url=needs.metrics_url,
        merged_kv_events=needs.merged_events,
        # Without it vLLM advertises "localhost" to decode engines, which are on another machine.
        side_channel_host=options.side_channel_host or options.bind_host or own_address(),
        side_channel_port=options.side_channel_port,
        model=str(options.model),
        served_names=options.served_model_name,
        argv=plan.engine_argv,
        flags=plan.flags,
        node=plan.node,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
        parses_answers=options.use_vllm_tokenizer,
        takes_embeds=options.enable_prompt_embeds,
        omni=options.omni,
        stage_configs_path=options.stage_configs_path,
        guide_seconds=options.guide_seconds,
        guide_memory_bytes=options.guide_memory_mb << 20,
        takes_guides=card.takes_guides,
        pools=card.kind == "pooling",
        transcribes=card.kind == "transcription",
        pair_template=options.custom_jinja_template if card.kind == "pooling" else None,
        direct_egress=options.direct_egress,
        traces_url=options.traces_url,
        lora=options.lora_enabled or "enable_lora" in plan.flags,
        publishes_kv_events=card.publishes_kv_events if options.kv_events is None else options.kv_events,
        kv_event_port=options.kv_event_port,
        engines_here=options.engines_here,
        scratch_folder=scratch,
        bind_host=options.bind_host,
        prometheus_folder=options.prometheus_multiproc_dir
        or (str(Path(scratch, "prometheus")) if needs.shares_metrics else None),
        environment=dict(environment),
    )


def encoders_of(options: WorkerOptions) -> tuple[str, str]:
    """Return the addresses where encode workers answer and where they transfer their output."""
    where = options.encoders_address
    return where, encoding_transfer.endpoint_of(where)


async def media_reader(
    options: WorkerOptions,
    output: EncoderOutput | None,
    engine: Engine,
    loader: MediaLoader | None,
    drt: Runtime,
    on_lost: Callable[[], None],
) -> Reader:
    """Return a media reader that calls encode workers first, if there may be some."""
    facts = engine.facts
    own = MediaReader(facts, loader, engine.parts.media)
    if loader is None or output is None or role_card(options).encodes_media:
        return own
    where, transfer_address = encoders_of(options)
    client = await when_not_busy(drt.endpoint(where).client)
    transfer_client = None
    if options.encoder_transfer == "nixl" and isinstance(output, EncoderFolder):
        transfer_endpoint = await when_not_busy(drt.endpoint(transfer_address).client)
        transfer_client = encoding_transfer.TransferClient(
            transfer_endpoint, encoded_folder(output, facts), encoding_transfer.NixlAgent()
        )
    seconds = options.encoder_seconds, options.media_timeout_seconds
    encoders = EncodeWorkers(client, *seconds, facts.context_length, transfer_client)
    if isinstance(output, OtherConnector):
        return EncodedReader(own, None, encoders, on_lost, has_own_names=True)
    direct = engine.parts.encoded if output.connector_role is None else None
    if direct is not None and (here := kinds_encoded_here(facts.media)):
        logger.warning(
            "encode workers get only images; this worker encodes %s itself (--ec-consumer-mode sends all)",
            " and ".join(here),
        )
    return EncodedReader(own, direct, encoders, on_lost)


def make_role(
    options: WorkerOptions,
    engine: Engine,
    connector: Connector | None,
    on_lost_transfer: Callable[[], None],
    media_reader: Reader,
    output: EncoderOutput | None = None,
    loader: MediaLoader | None = None,
) -> Role[Any]:
    facts, parts = engine.facts, engine.parts
    names = options.served_model_name or (str(options.model),)
    if facts.pipeline is not None:
        bounds = Bounds(
            max_side=options.max_picture_side,
            max_steps=options.max_picture_steps,
            max_images=options.max_pictures,
            max_megapixels=options.max_picture_megapixels,
            max_video_megapixels=options.max_video_megapixels,
        )
        return omni.MediaPipeline(facts, names, bounds, parts.count_tokens or omni.count_nothing)
    refuse_other_kind(options, facts)
    if options.use_vllm_tokenizer:
        if parts.renderer is None:
            raise StartError("--use-vllm-tokenizer: this engine has no tokenizer; leave it out")
        template = options.custom_jinja_template
        return text.AggregatedText(
            facts,
            parts.renderer,
            names,
            Path(template).read_text() if template else None,
            media_reader,
            options.exclude_tools_when_tool_choice_none,
        )
    is_encoder = role_card(options).encodes_media
    kept = encoded_folder(output, facts) if is_encoder and isinstance(output, EncoderFolder) else None
    return table.MAKERS[options.role](
        table.RoleParts(
            facts=facts,
            engine=parts,
            names=names,
            media_reader=media_reader,
            loader=loader,
            max_items=options.max_items,
            connector=connector,
            on_lost_transfer=on_lost_transfer,
            encoded=kept,
            local_prefill_tokens=options.local_prefill_tokens or 0,
            aggregated_card=omni.TEXT_CARD if options.omni else aggregated.CARD,
        )
    )


def refuse_other_kind(options: WorkerOptions, facts: EngineFacts) -> None:
    """Refuse a model that turns out to be of another kind than its files said."""
    planned = options.card.kind
    found = "pooling" if facts.pooling is not None else "generate"
    if facts.speech is not None:
        found = "transcription"
    if found == planned:
        return
    if found == "transcription" or planned == "transcription":
        does = "writes down speech" if found == "transcription" else "does not write down speech"
        flag = "--disaggregation-mode"
        raise StartError(
            f"{options.model} {does}; "
            + (f"start it with {flag} transcription" if found == "transcription" else f"leave {flag} out")
        )
    if found == "pooling":
        raise StartError(f"{options.model} is a pooling model; start it with --runner pooling")
    raise StartError(f"{options.model} generates text; start it with --runner generate")


@asynccontextmanager
async def media_loader(
    options: WorkerOptions, processor: MediaProcessor | None
) -> AsyncIterator[MediaLoader | None]:
    """Return the media loader; None if the worker accepts no media."""
    if options.card.kind == "transcription":
        from dynamo_vllm.media.loader import for_speech

        of_speech = for_speech(options)
        try:
            yield of_speech
        finally:
            await of_speech.aclose()
        return
    if not options.enable_multimodal:
        yield None
        return
    if processor is None:
        logger.warning("--enable-multimodal does nothing: %s takes text only", options.model)
        yield None
        return
    from dynamo_vllm.media.decode.frame_sampling import UNKNOWN, Sampler
    from dynamo_vllm.media.loader import from_options

    chooser = processor.frame_chooser()
    source = FrontendPixels(encoding_transfer.NixlAgent()) if options.frontend_decoding else None
    loader = from_options(options, Sampler(*chooser) if chooser else UNKNOWN, source)
    try:
        yield loader
    finally:
        await loader.aclose()
