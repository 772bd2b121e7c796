"""`dynamo-vllm size`: what a model needs in GPU memory, and what fits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config import build
from dynamo_vllm.config.options import SizeOptions
from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing import config_file, families, formats, gpus, layouts, memory
from dynamo_vllm.sizing.gpus import GIB
from dynamo_vllm.sizing.memory import EngineLoad, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.sizing.formats import WeightFormat
    from dynamo_vllm.sizing.gpus import Gpus
    from dynamo_vllm.sizing.layouts import Found
    from dynamo_vllm.sizing.memory import Need
    from dynamo_vllm.sizing.parts import Model

PROG = "dynamo-vllm size"
DESCRIPTION = """\
What a model needs in GPU memory, from its config.json; nothing is loaded and no GPU is needed.

  dynamo-vllm size MODEL                              parameters, weights, KV cache per token
  dynamo-vllm size MODEL --gpus 16xH200               the layouts that fit, fewest GPUs first
  dynamo-vllm size MODEL --gpus 8xH200 --tp 8         one layout: room for KV caches, requests at once
  dynamo-vllm size MODEL --gpus 8xH200 --dp 8 --ep --max-model-len 32768 --concurrency 256

MODEL is a config.json, a model's folder, or a hub id that is in this machine's cache."""
EPILOG = "Exit codes: 0 it fits, 1 it does not, 2 bad settings. docs/sizing.md says how the numbers are made."
SHOWN_LAYOUTS = 8
WHILE_LOADING = {"fp8": "fp8_per_tensor", "fp8-block": "fp8_per_block"}
"""What vLLM 0.30 can make of 16-bit files as it loads them, and its names for it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be sized."""

    source: str
    model: Model
    form: WeightFormat
    load: EngineLoad
    gpus: Gpus | None
    layout: Layout | None
    nodes: int = 1
    dtype: str | None = None
    quantisation: str | None = None
    """Where the user said other than the file."""
    is_quantised: bool = False
    """By the file."""

    @property
    def while_loading(self) -> str | None:
        """vLLM's name for what it is to make of the weights as it loads them."""
        return None if self.is_quantised else WHILE_LOADING.get(self.quantisation or "none")


@dataclass(frozen=True, slots=True)
class SizeAnswer:
    asked: Asked
    need: Need | None = None
    """Of the layout that was asked for."""
    found: Found | None = None
    """What fits, where no layout was."""

    @property
    def fits(self) -> bool:
        if self.need is not None:
            return self.need.fits
        return self.found is None or bool(self.found.fits)


def main(argv: Sequence[str]) -> int:
    environment = build.environment()
    words = ["--model", *argv] if argv and not argv[0].startswith("-") else list(argv)
    options, rest = build.parse(SizeOptions, words, environment, PROG, DESCRIPTION, EPILOG)
    if rest:
        raise ConfigError(f"{rest[0]} is no option of size; '{PROG} --help' lists them")
    if options.model is None:
        raise ConfigError(f"no model is named; write {PROG} MODEL, a config.json or its folder")
    path = config_file.find(options.model, environment)
    found = answer(asked(options, str(path), config_file.load(path)))
    print(json.dumps(as_json(found), indent=2) if options.json else "\n".join(text(found, options.brief)))
    return 0 if found.fits else 1


# --- what was asked for ---------------------------------------------------------------------------------


def asked(options: SizeOptions, source: str, config: dict[str, object]) -> Asked:
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
    there = gpus.read(options.gpus) if options.gpus is not None else None
    if there is not None and there.count % options.nodes:
        raise ConfigError(f"--gpus {there} cannot be shared out alike to --nodes {options.nodes}")
    layout = layout_of(options, there)
    is_quantised = config.get("quantization_config") is not None
    says_the_same = is_quantised and written_quantisation(config, source) in (options.quantization, None)
    named = options.dtype, None if says_the_same else options.quantization, is_quantised
    return Asked(source, model, form, load, there, layout, options.nodes, *named)


def written_quantisation(config: dict[str, object], source: str) -> str | None:
    """None where it is not known here, and the user says what it comes to."""
    try:
        return formats.of(config, source, "bfloat16", None).quantisation
    except ConfigError:
        return None


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


def check(options: SizeOptions) -> None:
    bounds.at_least(options, 1, *_COUNTS)
    if not 0 < options.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization {options.gpu_memory_utilization} is no part of a GPU; use 0.1 to 1"
        )
    if options.reserve_gib is not None and not 0 <= options.reserve_gib < float("inf"):
        raise ConfigError(f"--reserve-gib {options.reserve_gib} must be 0 or more")


def layout_of(options: SizeOptions, there: Gpus | None) -> Layout | None:
    """None where the layouts that fit are asked for."""
    sizes = (options.tensor_parallel_size, options.pipeline_parallel_size, options.data_parallel_size)
    if all(size is None for size in sizes) and not options.enable_expert_parallel:
        return None
    tp, pp, dp = (size or 1 for size in sizes)
    if there is None:
        raise ConfigError("a layout says nothing without GPUs; add --gpus, such as --gpus 8xH200")
    layout = Layout(tp=tp, pp=pp, dp=dp, ep=options.enable_expert_parallel)
    if layout.gpus > there.count:
        raise ConfigError(
            f"--tp {tp} --pp {pp} --dp {dp} take {layout.gpus} GPUs; --gpus {there} has {there.count}"
        )
    nodes = -(-layout.gpus // (there.count // options.nodes))
    if layout.gpus % nodes:
        raise ConfigError(f"{layout.gpus} GPUs cannot be shared out alike to {nodes} nodes")
    return dataclasses.replace(layout, nodes=nodes)


def answer(asked: Asked) -> SizeAnswer:
    if asked.gpus is None:
        return SizeAnswer(asked)
    if asked.layout is not None:
        return SizeAnswer(
            asked, memory.need(asked.model, asked.form, asked.layout, asked.gpus.gpu, asked.load)
        )
    there, per_node = asked.gpus, asked.gpus.count // asked.nodes if asked.nodes > 1 else None
    found = layouts.search(asked.model, asked.form, there.gpu, there.count, asked.load, per_node)
    return SizeAnswer(asked, found=found)


# --- text -----------------------------------------------------------------------------------------------


def text(answer: SizeAnswer, brief: bool = False) -> Iterator[str]:
    if not brief:
        yield from about_model(answer.asked)
        yield ""
    if answer.need is not None:
        yield from about_layout(answer.asked, answer.need)
    elif answer.found is not None:
        yield from about_layouts(answer.asked, answer.found)
    else:
        yield from about_known_gpus(answer.asked)


def about_model(asked: Asked) -> Iterator[str]:
    model, form = asked.model, asked.form
    active = f", {billions(model.active)} active per token" if model.is_moe else ""
    yield f"model     {model.family}, {len(model.layers)} layers: {billions(model.total)} parameters{active}"
    for part, count in model.by_part().items():
        yield f"  {part.value:<15} {billions(count):>10}"
    name = form.dtype if form.quantisation == "none" else f"{form.quantisation}, the rest {form.dtype}"
    yield f"weights   {gib(memory.weight_bytes(model, form))} in {name}"
    yield f"KV cache  {about_cache(asked)}"
    if model.next_token_layers:
        yield f"left out  {model.next_token_layers} layer(s) for speculative decoding, not loaded without it"


def about_cache(asked: Asked) -> str:
    model = asked.model
    value = memory.cache_value_bytes(asked.form, asked.load.cache_dtype)
    whole = memory.token_bytes(model.layers, value)
    kind = f"{asked.form.dtype if asked.load.cache_dtype == 'auto' else asked.load.cache_dtype}"
    windows = {layer.cache.window for layer in model.layers if layer.cache.window is not None}
    if not windows or not asked.load.has_windows:
        return f"{kib(whole)} per token in {kind}"
    full = [layer for layer in model.layers if layer.cache.window is None]
    near = len(model.layers) - len(full)
    return (
        f"{kib(memory.token_bytes(full, value))} per token in {kind} in {len(full)} layers; the other {near} "
        f"keep {kib(whole - memory.token_bytes(full, value))} of each of the last {max(windows)} tokens"
    )


def about_layout(asked: Asked, need: Need) -> Iterator[str]:
    layout, there = need.layout, asked.gpus
    assert there is not None
    copies, rest = divmod(there.count, layout.gpus)
    where = f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    more = f"; {copies} workers like this on {there}" if copies > 1 else ""
    yield f"layout    {in_words(layout)}{where}{more}"
    yield f"per GPU   {there.gpu.name} {there.gpu.gib:g} GiB × {asked.load.utilisation:g} = {gib(need.total)}"
    yield f"  weights   {gib(need.weights):>12}"
    estimate = (
        "" if asked.load.reserve_gib is not None else "  estimate: a step's activations, graphs, libraries"
    )
    yield f"  reserve   {gib(need.reserve):>12}{estimate}"
    yield f"  KV cache  {gib(need.room):>12}  {kib(need.cache_per_token)} per token on this GPU"
    if not need.fits:
        yield f"fits      no: {need.problem}"
        return
    yield f"fits      yes, with {about_requests(asked, need)}"
    if layout.tp > layout.gpus_per_node:
        yield f"note      {layout.tp} shards of a layer reach over a node's {layout.gpus_per_node} GPUs: slow"
    if rest:
        yield f"note      {rest} of the {there.count} GPUs stay free"
    if asked.quantisation not in (None, "none") and asked.while_loading is None:
        yield f"note      weights in {asked.quantisation} are other files: no flag makes them of these"
    yield f"flags     {' '.join(flags(asked, layout)) or 'none'}"


def about_requests(asked: Asked, need: Need) -> str:
    length, average = asked.load.length(asked.model), asked.load.average(asked.model)
    longest, usual = int(need.requests_of_max_len), int(need.requests_of_average_len)
    word = "request" if longest == 1 else "requests"
    found = f"{need.tokens:,} tokens of KV cache: {longest:,} {word} of {length:,} at once"
    return found if average == length else f"{found}, {usual:,} of {average:,}"


def about_layouts(asked: Asked, found: Found) -> Iterator[str]:
    there = asked.gpus
    assert there is not None
    if not found.fits:
        nearest = found.nearest
        assert nearest is not None
        yield f"fits      no layout on {there}; nearest: {in_words(nearest.layout)}: {nearest.problem}"
        return
    length, average = asked.load.length(asked.model), asked.load.average(asked.model)
    yield f"fits      on {there.gpu.name}; last columns: requests of {length:,} or {average:,} tokens at once"
    rows = [row(asked, need, length, average) for need in shown(found)]
    head = ("GPUs", "nodes", "weights", "KV cache", f"{length:,}", f"{average:,}", "flags")
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head) - 1)]
    for line in (head, *rows):
        yield "  " + "  ".join([*(cell.rjust(widths[at]) for at, cell in enumerate(line[:-1])), line[-1]])


def shown(found: Found) -> Sequence[Need]:
    """The best of each number of GPUs first, then what else there is of the smallest."""
    best: dict[int, Need] = {}
    for need in found.fits:
        best.setdefault(need.layout.gpus, need)
    fewest = min(best)
    more = [need for need in found.fits if need.layout.gpus == fewest and need is not best[fewest]]
    chosen = [best[fewest], *more[:3], *(need for count, need in best.items() if count != fewest)]
    return chosen[:SHOWN_LAYOUTS]


def row(asked: Asked, need: Need, length: int, average: int) -> tuple[str, ...]:
    return (
        str(need.layout.gpus),
        str(need.layout.nodes),
        gib(need.weights),
        gib(need.room),
        f"{int(need.requests_of_max_len):,}",
        f"{int(need.requests_of_average_len):,}",
        " ".join(layouts.flags(need.layout)) or "none",
    )


def about_known_gpus(asked: Asked) -> Iterator[str]:
    length = asked.load.length(asked.model)
    yield f"fewest    GPUs that hold it with one request of {length:,} tokens (--gpus says more)"
    for name, size in gpus.KNOWN.items():
        need = layouts.smallest(asked.model, asked.form, gpus.Gpu(name, size), asked.load)
        said = f"more than {layouts.MAX_GPUS}" if need is None else f"{need.layout.gpus:>2}"
        more = "" if need is None else "  " + " ".join(layouts.flags(need.layout))
        yield f"  {name:<8} {said}{more}".rstrip()


def in_words(layout: Layout) -> str:
    sizes = ((layout.tp, "tensor"), (layout.pp, "pipeline"), (layout.dp, "data"))
    words = [f"{name} parallel {size}" for size, name in sizes if size > 1]
    words += ["expert parallel"] if layout.ep else []
    return f"{', '.join(words)} = {layout.gpus} GPUs" if layout.gpus > 1 else "one GPU"


def flags(asked: Asked, layout: Layout) -> list[str]:
    """For the worker: the layout, and what was said about the engine."""
    load, found = asked.load, layouts.flags(layout)
    given = {
        "--dtype": asked.dtype,
        "--quantization": asked.while_loading,
        "--max-model-len": load.max_len,
        "--max-num-batched-tokens": load.max_batched_tokens,
        "--max-num-seqs": load.max_seqs,
        "--kv-cache-dtype": None if load.cache_dtype == "auto" else load.cache_dtype,
        "--gpu-memory-utilization": None if load.utilisation == memory.UTILISATION else load.utilisation,
    }
    for name, value in given.items():
        found += [] if value is None else [name, str(value)]
    return [*found, "--enforce-eager"] if load.eager else found


def billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**8 else f"{count / 1e6:.2f} M"


def gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB"


def kib(count: int) -> str:
    return f"{count / 1024:,.1f} KiB"


# --- JSON -----------------------------------------------------------------------------------------------


def as_json(answer: SizeAnswer) -> dict[str, object]:
    asked, model = answer.asked, answer.asked.model
    value = memory.cache_value_bytes(asked.form, asked.load.cache_dtype)
    found: dict[str, object] = {
        "source": asked.source,
        "family": model.family,
        "layers": len(model.layers),
        "parameters": model.total,
        "active_parameters": model.active,
        "parts": {part.value: count for part, count in model.by_part().items()},
        "dtype": asked.form.dtype,
        "quantization": asked.form.quantisation,
        "weight_bytes": memory.weight_bytes(model, asked.form),
        "cache_bytes_per_token": memory.token_bytes(model.layers, value),
        "fits": answer.fits,
    }
    if answer.need is not None:
        found["layout"] = _need_json(asked, answer.need)
    if answer.found is not None:
        found["layouts"] = [_need_json(asked, need) for need in answer.found.fits]
    return found


def _need_json(asked: Asked, need: Need) -> dict[str, object]:
    values = dataclasses.asdict(need)
    values["layout"]["gpus"] = need.layout.gpus
    return {**values, "fits": need.fits, "flags": flags(asked, need.layout)}
