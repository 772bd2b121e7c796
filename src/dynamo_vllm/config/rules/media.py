"""Rules for multimodal flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config import encoders
from dynamo_vllm.config.rules import bounds, flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

MULTIMODAL_ROLES = (
    "multimodal_worker",
    "multimodal_encode_worker",
    "multimodal_decode_worker",
    "multimodal_encode_prefill_worker",
    "multimodal_processor",
    "ec_processor",
    "vllm_native_encoder_worker",
)


NEED_MEDIA = (
    *MULTIMODAL_ROLES,
    "route_to_encoder",
    "ec_consumer_mode",
    "frontend_decoding",
    "mm_prompt_template",
    "media_hosts",
    "media_networks",
    "media_folder",
)


def one_multimodal_role(o: WorkerOptions, _: EngineFlags) -> None:
    named = bounds.given(o, MULTIMODAL_ROLES)
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are different multimodal roles; give one of them")


def multimodal_needs_its_switch(o: WorkerOptions, engine: EngineFlags) -> None:
    named = ["--ec-transfer-config"] if "ec_transfer_config" in engine else []
    named += bounds.given(o, NEED_MEDIA)
    named += ["--disaggregation-mode encode"] if o.card.encodes_media else []
    if named and not o.enable_multimodal:
        raise ConfigError(f"{named[0]} needs --enable-multimodal; add it")


def processors_are_the_frontend(o: WorkerOptions, _: EngineFlags) -> None:
    for name in bounds.given(o, ("multimodal_processor", "ec_processor")):
        raise ConfigError(
            f"{name}: the frontend has replaced this processor; start 'dynamo-vllm frontend' instead"
        )


def encoder_cache_flags_need_encoders(o: WorkerOptions, engine: EngineFlags) -> None:
    named = bounds.given(o, ("ec_connector_backend", "ec_storage_path", "ec_extra_config"))
    if "ec_transfer_config" in engine:
        named += ["--ec-transfer-config without ec_producer or ec_consumer as its ec_role"]
    if encoders.other_connector(o, engine) and encoders.transfer_config(engine).get("ec_role") == "ec_both":
        return  # an engine that uses its own encoder output again
    if named and not o.card.encodes_media and not o.asks_encoders:
        raise ConfigError(
            f"{named[0]} needs --disaggregation-mode encode, --route-to-encoder or --ec-consumer-mode; "
            "add one of them"
        )


def encoders_share_a_folder(o: WorkerOptions, engine: EngineFlags) -> None:
    if (o.card.encodes_media or o.asks_encoders) and encoders.output_of(o, engine) is None:
        encoder, asker = "--disaggregation-mode encode", "a worker that calls encode workers"
        asked = encoder if o.card.encodes_media else asker
        raise ConfigError(f"{asked} needs --ec-storage-path FOLDER, the same for both sides")


def encoder_transfer_is_consistent(o: WorkerOptions, engine: EngineFlags) -> None:
    written = flags.json_object("--ec-transfer-config", engine.get("ec_transfer_config") or "{}")
    other = encoders.other_connector(o, engine)
    if o.ec_connector_backend and written.get("ec_connector") not in (None, o.ec_connector_backend):
        raise ConfigError(
            f"--ec-connector-backend {o.ec_connector_backend} does not match the ec_connector of "
            "--ec-transfer-config; leave one of them out"
        )
    if other and o.encoder_transfer == "nixl":
        raise ConfigError(f"--encoder-transfer nixl cannot be combined with {other}; leave one of them out")
    role = written.get("ec_role")
    known = (encoders.PRODUCER, encoders.CONSUMER, *(["ec_both"] if other else []))
    if role is not None and role not in known:
        raise ConfigError(
            f"--ec-transfer-config: ec_role {role!r} is not supported; use ec_producer for an encode worker, "
            "ec_consumer for a worker that calls one"
        )
    if role is not None and (role == encoders.PRODUCER) != o.card.encodes_media:
        raise ConfigError(
            f"--ec-transfer-config: ec_role {role} does not match --disaggregation-mode {o.role}; "
            "leave one of them out"
        )


def encoder_transfer_needs_encoders(o: WorkerOptions, _: EngineFlags) -> None:
    if o.encoder_transfer == "nixl" and not o.card.encodes_media and not o.asks_encoders:
        raise ConfigError(
            "--encoder-transfer nixl needs --disaggregation-mode encode or --route-to-encoder; "
            "add one of them"
        )


def nixl_for_media_is_installed(o: WorkerOptions, _: EngineFlags) -> None:
    asked = {
        "--encoder-transfer nixl": o.encoder_transfer == "nixl",
        "--frontend-decoding": o.frontend_decoding,
    }
    named = [name for name, is_asked in asked.items() if is_asked]
    if named and not flags.is_installed("nixl"):
        raise ConfigError(f"{named[0]}: NIXL is not installed; run: pip install 'dynamo-vllm[nixl]'")


def an_encoder_only_encodes(o: WorkerOptions, engine: EngineFlags) -> None:
    if not o.card.encodes_media:
        return
    named = {
        "--use-vllm-tokenizer": o.use_vllm_tokenizer,
        "--enable-prompt-embeds": o.enable_prompt_embeds,
        f"--connector {' '.join(o.connector)}": bool(set(o.connector) - {"none", "null"}),
        "--kv-transfer-config": "kv_transfer_config" in engine,
        "--data-parallel-size": engine.get("data_parallel_size") not in (None, "1"),
        "--enable-lora": o.lora_enabled or bool(o.lora_modules) or "enable_lora" in engine,
        "--route-to-encoder": o.route_to_encoder or o.multimodal_worker or o.ec_consumer_mode,
    }
    for name, is_given in named.items():
        if is_given:
            raise ConfigError(f"{name} cannot be combined with --disaggregation-mode encode; leave it out")


def encoder_limits_are_limits(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.above_zero(o, "ec_storage_gb", "encoder_seconds")


def the_frontend_decodes_for_one_engine(o: WorkerOptions, _: EngineFlags) -> None:
    if not o.frontend_decoding:
        return
    named = {
        f"--disaggregation-mode {o.role}": not o.card.does_all,
        "--route-to-encoder": o.asks_encoders,
        "--use-vllm-tokenizer": o.use_vllm_tokenizer,
        "--media-folder": bool(o.media_folder),
        "--media-networks": bool(o.media_networks),
        # Untried whether frontend 1.6.1 takes patterns.
        "--media-hosts with *": any("*" in host for host in o.media_hosts),
    }
    for name, is_given in named.items():
        if is_given:
            raise ConfigError(f"{name} cannot be combined with --frontend-decoding; leave one of them out")


def media_template_has_a_prompt(o: WorkerOptions, _: EngineFlags) -> None:
    template = o.mm_prompt_template
    if template is None:
        return
    if template.count("<prompt>") != 1:
        raise ConfigError(
            f"--mm-prompt-template {template!r} must contain <prompt> exactly once, where the text goes"
        )
    if o.custom_jinja_template:
        raise ConfigError(
            "--custom-jinja-template cannot be combined with --mm-prompt-template; leave one of them out"
        )


def extra_encoder_config_is_known(o: WorkerOptions, engine: EngineFlags) -> None:
    """Check the settings of our own connector; those of others are theirs to check."""
    written = {"--ec-extra-config": flags.json_object("--ec-extra-config", o.ec_extra_config or "{}")}
    if encoders.other_connector(o, engine):
        return
    inside = encoders.transfer_config(engine).get("ec_connector_extra_config")
    if isinstance(inside, dict):
        written["--ec-transfer-config: ec_connector_extra_config"] = inside
    for name, extra in written.items():
        if unknown := sorted(extra.keys() - {encoders.SHARED_FOLDER}):
            raise ConfigError(
                f"{name} has the unknown setting {', '.join(unknown)}; "
                f"it takes only {encoders.SHARED_FOLDER} (--ec-storage-gb limits the folder)"
            )


RULES = (
    one_multimodal_role,
    multimodal_needs_its_switch,
    processors_are_the_frontend,
    extra_encoder_config_is_known,
    encoder_transfer_is_consistent,
    encoder_cache_flags_need_encoders,
    encoders_share_a_folder,
    encoder_transfer_needs_encoders,
    an_encoder_only_encodes,
    encoder_limits_are_limits,
    the_frontend_decodes_for_one_engine,
    nixl_for_media_is_installed,
    media_template_has_a_prompt,
)
