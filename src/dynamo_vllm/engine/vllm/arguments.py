"""Turns the user's flags into vLLM's arguments and configuration, with our defaults."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import os
from typing import TYPE_CHECKING, Any

from dynamo_vllm import ports
from dynamo_vllm.config import model_kind
from dynamo_vllm.config.engine_rules import LOOPBACK, OMP_THREADS, Fired, Situation, apply
from dynamo_vllm.engine.machine import device, free_bytes, has_bfloat16
from dynamo_vllm.engine.process import cpu_threads
from dynamo_vllm.engine.process.environment import MULTIPROC_METHOD
from dynamo_vllm.engine.vllm.compat import abilities
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.names import Config, EngineArgs


_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@dataclasses.dataclass(frozen=True, slots=True)
class Resolved:
    """Holds the engine's arguments after our rules, and the rules that fired."""

    args: EngineArgs
    fired: tuple[Fired, ...]


def resolve(settings: EngineSettings) -> Resolved:
    """Parses the engine flags with vLLM's own parser and adds our defaults."""
    import torch
    from vllm.config import ECTransferConfig, KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    parsed, given = _parse(settings)
    node = settings.node
    count, event_port = node.ports_in_a_row, settings.kv_event_port or node.event_port
    if settings.kv_transfer is not None:
        given["kv_transfer_config"] = parsed.kv_transfer_config = KVTransferConfig(**settings.kv_transfer)
    if settings.ec_transfer is not None:
        given["ec_transfer_config"] = parsed.ec_transfer_config = ECTransferConfig(**settings.ec_transfer)
    connectors = str(given.get("kv_transfer_config", "")).lower()
    nixl = "nixl" in connectors
    if nixl:
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(_side_channel_port(settings))
    situation = Situation(
        device=device(),
        has_bfloat16=has_bfloat16(),
        binds_threads=cpu_threads.BIND in settings.environment,
        publishes_kv_events=settings.publishes_kv_events,
        nixl=nixl,
        has_plain_blocks=settings.has_plain_blocks,
        merged_kv_events=settings.merged_kv_events,
        kv_event_port=event_port or (ports.reserve_in_a_row(count) if count > 1 else None),
        kv_event_host=node.leader if node.is_headless else LOOPBACK,
        socket_folder=settings.scratch_folder,
        lora=settings.lora,
        pools=settings.pools,
        source_positions=model_kind.source_positions(settings.model) if settings.transcribes else 0,
        encodes_only=settings.is_encoder,
        takes_encoded=settings.takes_encoded,
        traces_url=settings.traces_url,
        free_bytes=_free_bytes(settings),
        engines=settings.engines_here or node.engines,
        cores=None if cpu_threads.is_chosen(settings.environment) else cpu_threads.usable_cores(),
    )
    fired = tuple(apply(given, situation))
    for rule in fired:
        if rule.argument == OMP_THREADS:
            os.environ[OMP_THREADS] = str(rule.value)  # for the engine core, see `patches.cpu.thread_count`
            torch.set_num_threads(1)  # this process computes too little to use a second thread
        else:
            setattr(parsed, rule.argument, _typed(rule))
    if situation.device == "cpu" and parsed.distributed_executor_backend == "uni":
        # vLLM 0.30 ignores "uni" on CPU without this variable; the engine core is still a separate process.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if settings.reasoning_parser and _engine_knows_reasoning(settings.reasoning_parser):
        parsed.reasoning_parser = settings.reasoning_parser
    if settings.takes_embeds:
        parsed.enable_prompt_embeds = True
    try:
        return Resolved(AsyncEngineArgs.from_cli_args(parsed), fired)
    except (ValueError, TypeError) as exc:
        raise ConfigError(f"vLLM refuses these settings: {exc}") from exc


def _free_bytes(settings: EngineSettings) -> int | None:
    """Returns the memory that a CPU engine may share out; None if the user or the machine does not say."""
    free = None if settings.environment.get(_CACHE_SPACE) else free_bytes()
    return None if free is None else max(free - settings.host_tier_bytes, 0)


def given_flags(settings: EngineSettings) -> dict[str, Any]:
    """Returns the engine flags that the user gave, parsed by vLLM, without the model and its names."""
    _, given = _parse(settings)
    return {name: value for name, value in given.items() if name not in ("model", "served_model_name")}


def _parse(settings: EngineSettings) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Returns all of vLLM's arguments, and those that the user gave."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="dynamo-vllm worker", add_help=False))
    names = ["--served-model-name", *settings.served_names] if settings.served_names else []
    argv = ["--model", settings.model, *names, *settings.argv]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed = parser.parse_args(argv)
            marked = parser.parse_args(argv, namespace=_Marked(parser))
    except SystemExit:
        line = complaint.getvalue().strip().splitlines()[-1:] or ["unknown flag"]
        raise ConfigError(f"vLLM refuses a flag: {line[0].split('error: ')[-1]}") from None
    except ValueError as exc:
        raise ConfigError(f"vLLM refuses a flag: {exc}") from exc
    given = {name: value for name, value in vars(marked).items() if value is not _UNSET}
    return parsed, given


_UNSET = object()


class _Marked(argparse.Namespace):
    """Marks every argument as unset, to distinguish what the user gave from defaults."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(**{action.dest: _UNSET for action in parser._actions})


def _typed(rule: Fired) -> object:
    if rule.argument == "kv_events_config":
        from vllm.config import KVEventsConfig

        return KVEventsConfig(**rule.value)
    return rule.value


def _side_channel_port(settings: EngineSettings) -> int:
    node = settings.node
    if settings.side_channel_port is None:
        return ports.reserve_in_a_row(node.ports_in_a_row)
    ports.refuse_taken(
        "--side-channel-port", settings.side_channel_host or "", settings.side_channel_port + node.first_rank
    )
    return settings.side_channel_port


def _engine_knows_reasoning(name: str) -> bool:
    from vllm.reasoning import ReasoningParserManager

    return name in ReasoningParserManager.list_registered()


def create_config(args: EngineArgs, settings: EngineSettings) -> Config:
    """Creates vLLM's configuration. Reads the model's files; raises ConfigError if they are unusable."""
    from vllm.usage.usage_lib import UsageContext

    try:
        # The context of `vllm serve`: vLLM chooses batch sizes by it, and much smaller ones for others.
        context = UsageContext.OPENAI_API_SERVER
        config = args.create_engine_config(context, headless=settings.node.is_headless)
    except (ValueError, OSError, NotImplementedError) as exc:
        raise ConfigError(f"vLLM cannot serve {args.model} with these settings: {_first_lines(exc)}") from exc
    _refuse_ranks_of_a_dense_model(config)
    _refuse_adapters_in_float32(config)
    _refuse_untried_speculation_on_cpu(config)
    # vLLM 0.30: its CPU platform overwrites the user's choice.
    if MULTIPROC_METHOD in settings.environment:
        os.environ[MULTIPROC_METHOD] = settings.environment[MULTIPROC_METHOD]
    return config


def loading_phase(config: Config) -> str:
    """Returns the name of the phase until the engine has started; compiling can take minutes."""
    return "loading and compiling" if config.compilation_config.mode else "loading"


def described(args: EngineArgs, config: Config) -> dict[str, Any]:
    """Returns vLLM's arguments with the values that it resolved."""
    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    parallel = config.parallel_config
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)} | {
        "model": model.model,
        "tokenizer": model.tokenizer,
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization,
        "max_model_len": model.max_model_len,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_chunked_prefill": scheduler.enable_chunked_prefill,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "distributed_executor_backend": parallel.distributed_executor_backend,
        "kv_transfer_config": config.kv_transfer_config,
        "kv_events_config": config.kv_events_config,
        "ec_transfer_config": config.ec_transfer_config,
    }


def _refuse_ranks_of_a_dense_model(config: Config) -> None:
    """Refuses data-parallel workers of one rank for a dense model.

    vLLM 0.30 does so only for --data-parallel-rank; with other flags it fails in an assertion after loading.
    """
    parallel, model = config.parallel_config, config.model_config
    if parallel.data_parallel_size > 1 and parallel.data_parallel_external_lb and not model.is_moe:
        raise ConfigError(
            f"{model.model} is not an MoE model: its data-parallel ranks would be independent engines; "
            "start them without --data-parallel-size"
        )


def _refuse_adapters_in_float32(config: Config) -> None:
    """Refuses LoRA with float32 on GPUs; vLLM 0.30 fails in a kernel's assertion, after loading the model."""
    if config.lora_config is not None and device() == "cuda" and "float32" in str(config.model_config.dtype):
        raise ConfigError("vLLM's LoRA kernels do not support --dtype float32; use float16 or bfloat16")


def _refuse_untried_speculation_on_cpu(config: Config) -> None:
    """Refuses methods that were not run on a CPU: an engine may crash with its first draft.

    N-gram speculation works: its rejection sampler is patched (`patches.cpu.speculative`).
    """
    speculative, methods = config.speculative_config, abilities.speculative_methods_on_cpu()
    if device() == "cpu" and speculative is not None and speculative.method not in methods:
        raise ConfigError(
            f"--speculative-config: this vLLM does not support {speculative.method} on a CPU; "
            f"use {' or '.join(sorted(methods))}, or leave it out"
        )


def _first_lines(exc: Exception) -> str:
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return " ".join(lines[:4]) or type(exc).__name__
