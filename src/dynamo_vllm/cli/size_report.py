"""Prints what `dynamo-vllm size` found: text for a terminal, or JSON."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm.sizing import gpus, layouts, memory, tiers
from dynamo_vllm.sizing.estimate import worker_flags
from dynamo_vllm.sizing.gpus import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.sizing.estimate import SizeRequest, SizeResult
    from dynamo_vllm.sizing.layouts import Found
    from dynamo_vllm.sizing.memory import Layout, Need

SHOWN_LAYOUTS = 8


def text(result: SizeResult, brief: bool = False) -> Iterator[str]:
    """Yield the lines for a terminal; `brief` leaves out the model's."""
    if not brief:
        yield from model_lines(result.request)
        yield ""
    if result.need is not None:
        yield from layout_lines(result.request, result.need)
    elif result.found is not None:
        yield from fitting_layouts_lines(result.request, result.found)
    else:
        yield from known_gpus_lines(result.request)
    if result.request.tiers:
        yield tier_line(result)


def model_lines(request: SizeRequest) -> Iterator[str]:
    model, form = request.model, request.form
    active = f", {billions(model.active)} active per token" if model.is_moe else ""
    yield f"model     {model.family}, {len(model.layers)} layers: {billions(model.total)} parameters{active}"
    for part, count in model.by_part().items():
        yield f"  {part.value:<15} {billions(count):>10}"
    name = form.dtype if form.quantisation == "none" else f"{form.quantisation}, the rest {form.dtype}"
    yield f"weights   {gib(memory.weight_bytes(model, form))} in {name}"
    yield f"KV cache  {cache_line(request)}"
    if model.next_token_layers:
        yield f"left out  {model.next_token_layers} layer(s) for speculative decoding, not loaded without it"


def cache_line(request: SizeRequest) -> str:
    model = request.model
    if not model.has_cache:
        return "none: an encoder keeps nothing of a text"
    value = memory.cache_value_bytes(request.form, request.load.cache_dtype)
    whole = memory.token_bytes(model.layers, value)
    kind = f"{request.form.dtype if request.load.cache_dtype == 'auto' else request.load.cache_dtype}"
    windows = {layer.cache.window for layer in model.layers if layer.cache.window is not None}
    if not windows or not request.load.has_windows:
        return f"{kib(whole)} per token in {kind}"
    full = [layer for layer in model.layers if layer.cache.window is None]
    near = len(model.layers) - len(full)
    return (
        f"{kib(memory.token_bytes(full, value))} per token in {kind} in {len(full)} layers; the other {near} "
        f"keep {kib(whole - memory.token_bytes(full, value))} of each of the last {max(windows)} tokens"
    )


def layout_lines(request: SizeRequest, need: Need) -> Iterator[str]:
    layout, available = need.layout, request.gpus
    assert available is not None
    copies, rest = divmod(available.count, layout.gpus)
    where = f" on {layout.nodes} nodes" if layout.nodes > 1 else ""
    more = f"; {copies} workers like this on {available}" if copies > 1 else ""
    yield f"layout    {layout_name(layout)}{where}{more}"
    share = f"{request.load.utilisation:g}"
    yield f"per GPU   {available.gpu.name} {available.gpu.gib:g} GiB × {share} = {gib(need.total)}"
    yield f"  weights   {gib(need.weights):>12}"
    estimate = (
        "" if request.load.reserve_gib is not None else "  estimate: a step's activations, graphs, libraries"
    )
    yield f"  reserve   {gib(need.reserve):>12}{estimate}"
    if request.model.has_cache:
        yield f"  KV cache  {gib(need.room):>12}  {kib(need.cache_per_token)} per token on this GPU"
    else:
        yield f"  free      {gib(need.room):>12}  a lower --gpu-memory-utilization leaves it to others"
    if not need.fits:
        yield f"fits      no: {need.problem}"
        return
    yield f"fits      yes, with {request_capacity(request, need)}"
    if layout.tp > layout.gpus_per_node:
        yield f"note      {layout.tp} shards of a layer span nodes of {layout.gpus_per_node} GPUs: slow"
    if rest:
        yield f"note      {rest} of the {available.count} GPUs stay unused"
    if request.quantisation not in (None, "none") and request.online_quantisation is None:
        yield f"note      weights in {request.quantisation} need other files: no flag converts these"
    yield f"flags     {' '.join(worker_flags(request, layout)) or 'none'}"


def request_capacity(request: SizeRequest, need: Need) -> str:
    length, average = request.load.length(request.model), request.load.average(request.model)
    longest, usual = int(need.requests_of_max_len), int(need.requests_of_average_len)
    word = "request" if longest == 1 else "requests"
    if not request.model.has_cache:
        return f"{longest:,} {word} at once (--max-num-seqs)"
    found = f"{need.tokens:,} tokens of KV cache: {longest:,} {word} of {length:,} at once"
    return found if average == length else f"{found}, {usual:,} of {average:,}"


def tier_line(result: SizeResult) -> str:
    held = [f"{gb:,g} GB of {name} hold {count:,} tokens" for name, gb, count in _tiers(result)]
    per_token = _tier_token_bytes(result)
    where = "" if result.need is None or result.need.layout.gpus == 1 else " of all shards"
    length = result.request.load.average(result.request.model)
    prompt = f"{length * per_token / tiers.GB:,.2g} GB to load for a prompt of {length:,}"
    return f"tiers     {', '.join(held)}: {kib(per_token)} per token{where}, {prompt}"


def _tiers(result: SizeResult) -> list[tuple[str, float, int]]:
    """Return the name and size of each tier, and the tokens that it holds."""
    per_token = _tier_token_bytes(result)
    return [(name, gb, tiers.tokens(gb, per_token)) for name, gb in result.request.tiers.items()]


def _tier_token_bytes(result: SizeResult) -> int:
    request = result.request
    layout = tiers.ONE_GPU if result.need is None else result.need.layout
    return tiers.token_bytes(request.model, request.form, request.load, layout)


def fitting_layouts_lines(request: SizeRequest, found: Found) -> Iterator[str]:
    available = request.gpus
    assert available is not None
    if not found.fits:
        nearest = found.nearest
        assert nearest is not None
        yield f"fits      no layout on {available}; nearest: {layout_name(nearest.layout)}: {nearest.problem}"
        return
    length, average = request.load.length(request.model), request.load.average(request.model)
    lengths = f"requests of {length:,} or {average:,} tokens at once"
    yield f"fits      on {available.gpu.name}; last columns: {lengths}"
    rows = [row(request, need, length, average) for need in chosen_layouts(found)]
    left = "KV cache" if request.model.has_cache else "free"
    head = ("GPUs", "nodes", "weights", left, f"{length:,}", f"{average:,}", "flags")
    widths = [max(len(line[at]) for line in (head, *rows)) for at in range(len(head) - 1)]
    for line in (head, *rows):
        yield "  " + "  ".join([*(cell.rjust(widths[at]) for at, cell in enumerate(line[:-1])), line[-1]])


def chosen_layouts(found: Found) -> Sequence[Need]:
    """Return the best layout for the fewest GPUs, a few others for as many, and the best for more GPUs."""
    best: dict[int, Need] = {}
    for need in found.fits:
        best.setdefault(need.layout.gpus, need)
    fewest = min(best)
    more = [need for need in found.fits if need.layout.gpus == fewest and need is not best[fewest]]
    chosen = [best[fewest], *more[:3], *(need for count, need in best.items() if count != fewest)]
    return chosen[:SHOWN_LAYOUTS]


def row(request: SizeRequest, need: Need, length: int, average: int) -> tuple[str, ...]:
    return (
        str(need.layout.gpus),
        str(need.layout.nodes),
        gib(need.weights),
        gib(need.room),
        f"{int(need.requests_of_max_len):,}",
        f"{int(need.requests_of_average_len):,}",
        " ".join(layouts.flags(need.layout)) or "none",
    )


def known_gpus_lines(request: SizeRequest) -> Iterator[str]:
    length = request.load.length(request.model)
    yield f"fewest    GPUs that hold it with one request of {length:,} tokens (--gpus says more)"
    for name, size in gpus.KNOWN.items():
        need = layouts.smallest(request.model, request.form, gpus.Gpu(name, size), request.load)
        said = f"more than {layouts.MAX_GPUS}" if need is None else f"{need.layout.gpus:>2}"
        more = "" if need is None else "  " + " ".join(layouts.flags(need.layout))
        yield f"  {name:<8} {said}{more}".rstrip()


def layout_name(layout: Layout) -> str:
    sizes = ((layout.tp, "tensor"), (layout.pp, "pipeline"), (layout.dp, "data"))
    words = [f"{name} parallel {size}" for size, name in sizes if size > 1]
    words += ["expert parallel"] if layout.ep else []
    return f"{', '.join(words)} = {layout.gpus} GPUs" if layout.gpus > 1 else "one GPU"


def billions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 10**8 else f"{count / 1e6:.2f} M"


def gib(count: int) -> str:
    return f"{count / GIB:,.1f} GiB"


def kib(count: int) -> str:
    return f"{count / 1024:,.1f} KiB"


# --- JSON -----------------------------------------------------------------------------------------------


def as_json(result: SizeResult) -> dict[str, object]:
    request, model = result.request, result.request.model
    value = memory.cache_value_bytes(request.form, request.load.cache_dtype)
    found: dict[str, object] = {
        "source": request.source,
        "family": model.family,
        "layers": len(model.layers),
        "parameters": model.total,
        "active_parameters": model.active,
        "parts": {part.value: count for part, count in model.by_part().items()},
        "dtype": request.form.dtype,
        "quantization": request.form.quantisation,
        "weight_bytes": memory.weight_bytes(model, request.form),
        "cache_bytes_per_token": memory.token_bytes(model.layers, value),
        "fits": result.fits,
    }
    if request.tiers:
        found["tiers"] = {
            "bytes_per_token": _tier_token_bytes(result),
            "tokens": {name: count for name, _, count in _tiers(result)},
        }
    if result.need is not None:
        found["layout"] = _need_json(request, result.need)
    if result.found is not None:
        found["layouts"] = [_need_json(request, need) for need in result.found.fits]
    return found


def _need_json(request: SizeRequest, need: Need) -> dict[str, object]:
    values = dataclasses.asdict(need)
    values["layout"]["gpus"] = need.layout.gpus
    return {**values, "fits": need.fits, "flags": worker_flags(request, need.layout)}
