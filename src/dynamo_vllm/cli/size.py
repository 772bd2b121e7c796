"""Runs `dynamo-vllm size`: estimates what a model needs in GPU memory, and which layouts fit."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from dynamo_vllm.cli.size_report import as_json, text
from dynamo_vllm.config import build
from dynamo_vllm.config.options import SizeOptions
from dynamo_vllm.config.options.kv_cache import disk_space
from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import config_file, families, formats, gpus
from dynamo_vllm.sizing.estimate import SizeRequest, estimate
from dynamo_vllm.sizing.memory import EngineLoad, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.sizing.gpus import Gpus

PROG = "dynamo-vllm size"
DESCRIPTION = """\
Estimate what a model needs in GPU memory, from its config.json; nothing is loaded and no GPU is needed.

  dynamo-vllm size MODEL                              parameters, weights, KV cache per token
  dynamo-vllm size MODEL --gpus 16xH200               the layouts that fit, fewest GPUs first
  dynamo-vllm size MODEL --gpus 8xH200 --tp 8         one layout: room for KV caches, requests at once
  dynamo-vllm size MODEL --gpus 8xH200 --dp 8 --ep --max-model-len 32768 --concurrency 256
  dynamo-vllm size MODEL --kv-offload-gb 64 --kv-offload-disk 500   tokens that tiers hold

MODEL is a config.json, a model's folder, or a hub id that is in this machine's cache."""
EPILOG = "Exit codes: 0 it fits, 1 it does not, 2 bad settings. docs/sizing.md explains the numbers."
_COUNTS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "nodes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "concurrency",
    "average_len",
)


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    words = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    options, rest = build.parse(SizeOptions, words, environment, PROG, DESCRIPTION, EPILOG)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of size; '{PROG} --help' lists them")
    if options.model is None:
        raise ConfigError(f"no model is named; write {PROG} MODEL, a config.json or its folder")
    path = config_file.find(options.model, environment)
    found = estimate(size_request(options, str(path), config_file.load(path)))
    print(json.dumps(as_json(found), indent=2) if options.json else "\n".join(text(found, options.brief)))
    return 0 if found.fits else 1


def size_request(options: SizeOptions, source: str, config: dict[str, object]) -> SizeRequest:
    """Combine the options with the model's config.json, which came from `source`."""
    check(options)
    model = families.read(config, source)
    form = formats.of(config, source, options.dtype, options.quantization)
    load = EngineLoad(
        utilisation=options.gpu_memory_utilization,
        max_len=options.max_model_len,
        average_len=options.average_len,
        max_batched_tokens=options.max_num_batched_tokens,
        max_seqs=options.max_num_seqs,
        cache_dtype=options.kv_cache_dtype,
        concurrency=options.concurrency,
        reserve_gib=options.reserve_gib,
        has_windows=options.hybrid_cache,
        eager=options.enforce_eager,
    )
    available = gpus.read(options.gpus) if options.gpus is not None else None
    if available is not None and available.count % options.nodes:
        raise ConfigError(f"--gpus {available} cannot be divided evenly among --nodes {options.nodes}")
    layout = requested_layout(options, available)
    is_quantised = config.get("quantization_config") is not None
    is_as_in_file = is_quantised and file_quantisation(config, source) in (options.quantization, None)
    named = options.dtype, None if is_as_in_file else options.quantization, is_quantised
    sizes = tier_sizes(options)
    if sizes and not model.has_cache:
        raise ConfigError(f"{source}: an encoder keeps nothing of a text; leave --kv-offload-… out")
    return SizeRequest(source, model, form, load, available, layout, options.nodes, *named, tiers=sizes)


def tier_sizes(options: SizeOptions) -> dict[str, float]:
    """Return the GB of each tier of KV caches; those of a disk may come with a folder."""
    found: dict[str, float] = {}
    if options.kv_offload_gb is not None:
        found["host memory"] = options.kv_offload_gb
    if options.kv_offload_disk is not None:
        space = disk_space(f"anywhere:{options.kv_offload_disk.rpartition(':')[2]}")
        if space is None:
            raise ConfigError(f"--kv-offload-disk {options.kv_offload_disk} is not a size in GB above 0")
        found["disk"] = space.gb
    return found


def file_quantisation(config: dict[str, object], source: str) -> str | None:
    """Return the quantisation of the model's files; None if this package does not know it."""
    try:
        return formats.of(config, source, "bfloat16", None).quantisation
    except ConfigError:
        return None


def check(options: SizeOptions) -> None:
    bounds.at_least(options, 1, *_COUNTS)
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {options.gpu_memory_utilization} must be above 0 and at most 1"
        )
    bounds.above_zero(options, "kv_offload_gb")
    if options.reserve_gib is not None and not 0 <= options.reserve_gib < float("inf"):
        raise ConfigError(f"--reserve-gib {options.reserve_gib} must be 0 or more")


def requested_layout(options: SizeOptions, available: Gpus | None) -> Layout | None:
    """Return the layout that the options name; None if they name none and the search is to find some."""
    sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size)
    if all(size is None for size in sizes) and not options.enable_expert_parallel:
        return None
    tp, pp, dp = (size or 1 for size in sizes)
    if available is None:
        raise ConfigError("a layout needs GPUs; add --gpus, such as --gpus 8xH200")
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=options.enable_expert_parallel)
    if layout.gpus > available.count:
        raise ConfigError(
            f"--tp {tp} --pp {pp} --dp {dp} take {layout.gpus} GPUs; --gpus {available} has {available.count}"
        )
    nodes = -(-layout.gpus // (available.count // options.nodes))
    if layout.gpus % nodes:
        raise ConfigError(f"{layout.gpus} GPUs cannot be divided evenly among {nodes} nodes")
    return dataclasses.replace(layout, nodes=nodes)
