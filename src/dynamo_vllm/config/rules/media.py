"""Rules for multimodal flags."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.config.rules import flags
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


def one_multimodal_role(o: WorkerOptions, _: EngineFlags) -> None:
    named = [flags.flag(n) for n in MULTIMODAL_ROLES if getattr(o, n)]
    if len(named) > 1:
        raise ConfigError(f"{' and '.join(named)} are different multimodal roles; give one of them")


def multimodal_needs_its_switch(o: WorkerOptions, _: EngineFlags) -> None:
    names = (*MULTIMODAL_ROLES, "route_to_encoder", "frontend_decoding", "mm_prompt_template")
    named = [flags.flag(n) for n in names if getattr(o, n)]
    if named and not o.enable_multimodal:
        raise ConfigError(f"{named[0]} needs --enable-multimodal; add it")


def example_encoder_cache_needs_a_folder(o: WorkerOptions, _: EngineFlags) -> None:
    if o.ec_connector_backend == "ECExampleConnector" and not o.ec_storage_path:
        raise ConfigError("--ec-connector-backend ECExampleConnector needs --ec-storage-path FOLDER")


def encoder_cache_flags_need_a_user(o: WorkerOptions, _: EngineFlags) -> None:
    named = [
        flags.flag(n) for n in ("ec_connector_backend", "ec_storage_path", "ec_extra_config") if getattr(o, n)
    ]
    if named and not (o.vllm_native_encoder_worker or o.ec_consumer_mode):
        raise ConfigError(f"{named[0]} needs --vllm-native-encoder-worker or --ec-consumer-mode")


def extra_encoder_config_is_json(o: WorkerOptions, _: EngineFlags) -> None:
    if o.ec_extra_config is not None:
        flags.json_object("--ec-extra-config", o.ec_extra_config)


RULES = (
    one_multimodal_role,
    multimodal_needs_its_switch,
    example_encoder_cache_needs_a_folder,
    encoder_cache_flags_need_a_user,
    extra_encoder_config_is_json,
)
