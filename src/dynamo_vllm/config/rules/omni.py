"""Rules for pipelines of vLLM-Omni."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config.rules import bounds, flags
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags


def stages_need_omni(o: WorkerOptions, _: EngineFlags) -> None:
    if o.stage_configs_path and not o.omni:
        raise ConfigError(
            f"--stage-configs-path {o.stage_configs_path} needs --omni; add it or leave the file out"
        )


def omni_has_no_connector(o: WorkerOptions, engine: EngineFlags) -> None:
    named = [f"--connector {' '.join(o.connector)}"] if set(o.connector) - {"none", "null"} else []
    named += ["--kv-transfer-config"] if "kv_transfer_config" in engine else []
    if o.omni and named:
        raise ConfigError(
            f"{named[0]} cannot be combined with --omni: a pipeline transfers no KV caches; leave it out"
        )


def omni_publishes_no_kv_events(o: WorkerOptions, engine: EngineFlags) -> None:
    asked = {
        "--kv-events": o.kv_events is True,
        "--kv-event-port": o.kv_event_port is not None,
        "--kv-events-config": "kv_events_config" in engine,
    }
    named = [name for name, is_asked in asked.items() if is_asked]
    if o.omni and named:
        raise ConfigError(
            f"{named[0]} cannot be combined with --omni: a pipeline publishes no KV events; leave it out"
        )


_NODE_FLAGS = (
    "master_addr",
    "master_port",
    "data_parallel_size_local",
    "data_parallel_start_rank",
    "data_parallel_rank",
    "data_parallel_address",
    "data_parallel_rpc_port",
    "data_parallel_hybrid_lb",
    "data_parallel_external_lb",
)


def omni_stays_on_one_node(o: WorkerOptions, engine: EngineFlags) -> None:
    """A node without an endpoint would start plain vLLM."""
    named = ["--headless"] if o.headless else []
    named += ["--nnodes"] if engine.get("nnodes", "1") != "1" else []
    named += ["--node-rank"] if engine.get("node_rank", "0") != "0" else []
    named += [flags.flag(name) for name in _NODE_FLAGS if name in engine]
    if o.omni and named:
        raise ConfigError(
            f"{named[0]} cannot be combined with --omni: all stages of a pipeline run on one node; leave "
            "it out"
        )


def stage_file_exists(o: WorkerOptions, _: EngineFlags) -> None:
    if o.stage_configs_path and not Path(o.stage_configs_path).is_file():
        raise ConfigError(f"--stage-configs-path {o.stage_configs_path}: there is no such file")


def omni_is_one_rank(o: WorkerOptions, engine: EngineFlags) -> None:
    """vLLM-Omni 0.30: a text stage of two ranks does not start on a CPU; image stages are untried."""
    ranks = engine.get("data_parallel_size", "1")
    if o.omni and ranks != "1":
        raise ConfigError(
            f"--data-parallel-size {ranks} cannot be combined with --omni: a pipeline has one rank; "
            "start more workers instead"
        )


def omni_does_everything_of_a_request(o: WorkerOptions, _: EngineFlags) -> None:
    if o.omni and not o.card.does_all:
        raise ConfigError(
            f"--disaggregation-mode {o.role} cannot be combined with --omni; leave one of them out"
        )


def omni_takes_text_only(o: WorkerOptions, engine: EngineFlags) -> None:
    if not o.omni:
        return
    named = bounds.given(o, ("enable_multimodal", "enable_prompt_embeds", "lora_enabled"))
    named += ["--enable-lora"] if "enable_lora" in engine else []
    if named:
        raise ConfigError(f"{named[0]} cannot be combined with --omni; leave one of them out")


def omni_needs_its_own_engine(o: WorkerOptions, _: EngineFlags) -> None:
    if o.omni and o.engine == "fake":
        raise ConfigError("--omni needs vLLM-Omni; leave out --engine fake")


def picture_bounds_are_counts(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.at_least(o, 1, "max_picture_side", "max_picture_steps", "max_pictures")
    for name, value in bounds.values(o, ("max_picture_megapixels", "max_video_megapixels")):
        if not value > 0:
            raise ConfigError(f"{name} {value} must be above 0")


RULES = (
    stages_need_omni,
    stage_file_exists,
    omni_has_no_connector,
    omni_publishes_no_kv_events,
    omni_stays_on_one_node,
    omni_is_one_rank,
    omni_does_everything_of_a_request,
    omni_takes_text_only,
    omni_needs_its_own_engine,
    picture_bounds_are_counts,
)
