"""Refuses adapters that vLLM would load silently and serve wrong, or that would crash its engine.

vLLM 0.30 loads an adapter whose tensors have other shapes than the base model's, passes NaN into the cache of
other requests, and scales every module by lora_alpha / r whatever rank_pattern and alpha_pattern say. So we
check all of that before the engine sees the files. Reads headers and bytes; no torch.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import AdapterRefused
from dynamo_vllm.lora import tensors
from dynamo_vllm.lora.base import CONFIG, WEIGHTS, AdapterFacts

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dynamo_vllm.lora.base_model import BaseModel, Shape
    from dynamo_vllm.lora.tensors import Tensor

MAX_CONFIG_BYTES = 1 << 20
_PREFIX = "base_model.model."
_KINDS = {".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_embedding_A": "A", ".lora_embedding_B": "B"}
_FUSED_EXPERTS = (".experts", ".experts.base_layer")
PICKLES = ("adapter_model.bin", "adapter_model.pt")


def inspect(folder: Path, base: BaseModel, max_rank: int) -> AdapterFacts:
    """Raise AdapterRefused with the reason; blocks while it reads the weights."""
    config = _read_config(folder)
    rank, alpha = _check_config(config, max_rank)
    path = _weights_file(folder)
    try:
        found = tensors.read_header(path)
        pairs = _pair_up(found)
        for module, pair in pairs.items():
            _check_pair(module, pair, rank, base, config)
        broken = tensors.first_not_finite(path, found)
    except tensors.BrokenFile as exc:
        raise AdapterRefused(str(exc)) from None
    except OSError as exc:
        raise AdapterRefused(f"{path.name} cannot be read: {exc.strerror}") from exc
    if broken is not None:
        raise AdapterRefused(
            f"tensor {broken} contains NaN or an infinity; the training of the adapter failed"
        )
    return AdapterFacts(
        rank=rank,
        alpha=alpha,
        modules=tuple(sorted({module.rpartition(".")[2] for module in pairs})),
        bytes=path.stat().st_size,
        base_name=_base_name(config),
    )


# -- adapter_config.json ---------------------------------------------------------------------------


def _read_config(folder: Path) -> dict[str, object]:
    path = folder / CONFIG
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except FileNotFoundError:
        raise AdapterRefused(f"there is no {CONFIG}; this is not the folder of a PEFT adapter") from None
    except OSError as exc:
        raise AdapterRefused(f"{CONFIG} cannot be read: {exc.strerror}") from exc
    if len(raw) > MAX_CONFIG_BYTES:
        raise AdapterRefused(f"{CONFIG} has more than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError):
        state = "is not JSON" if raw.strip() else "is empty"
        raise AdapterRefused(f"{CONFIG} {state}") from None
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG} is not a JSON object")
    return config


def _check_config(config: Mapping[str, object], max_rank: int) -> tuple[int, float]:
    """Return rank and alpha."""
    if config.get("peft_type") != "LORA":
        raise AdapterRefused(f"peft_type is {config.get('peft_type')!r}; vLLM serves only LORA")
    if not isinstance(config.get("target_modules"), list | str):
        raise AdapterRefused("target_modules is missing")
    _refuse_what_vllm_cannot(config)
    rank, alpha = _rank("r", config.get("r"), max_rank), config.get("lora_alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise AdapterRefused(f"lora_alpha is {alpha!r}; it must be a number")
    ranks, alphas = _pattern(config, "rank_pattern"), _pattern(config, "alpha_pattern")
    for module, value in ranks.items():
        _rank(f"rank_pattern of {module}", value, max_rank)
    odd = [module for module, value in alphas.items() if value != alpha]
    if odd:
        raise AdapterRefused(
            f"alpha_pattern gives {odd[0]} a scale of its own, which vLLM ignores; the answers would be wrong"
        )
    return rank, float(alpha)


def _refuse_what_vllm_cannot(config: Mapping[str, object]) -> None:
    if config.get("use_dora"):
        raise AdapterRefused("use_dora: vLLM does not serve DoRA adapters")
    if config.get("modules_to_save"):
        raise AdapterRefused(
            f"modules_to_save is {config['modules_to_save']!r}: vLLM loads no whole modules from adapters"
        )
    if config.get("bias", "none") != "none":
        raise AdapterRefused(f"bias is {config['bias']!r}: vLLM does not load biases from adapters")


def _rank(what: str, value: object, max_rank: int) -> int:
    if type(value) is not int or value < 1:
        raise AdapterRefused(f"{what} is {value!r}; a rank is a whole number above 0")
    if value > max_rank:
        raise AdapterRefused(
            f"{what} is {value}, this worker takes {max_rank}; start it with --max-lora-rank {value} or more"
        )
    return value


def _pattern(config: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = config.get(name) or {}
    if not isinstance(value, dict):
        raise AdapterRefused(f"{name} is {value!r}; it must be an object")
    return value


def _base_name(config: Mapping[str, object]) -> str | None:
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


# -- adapter_model.safetensors ---------------------------------------------------------------------


def _weights_file(folder: Path) -> Path:
    path = folder / WEIGHTS
    if path.is_file():
        return path
    for name in PICKLES:
        if (folder / name).is_file():
            raise AdapterRefused(pickle_refusal(name))
    raise AdapterRefused(f"there is no {WEIGHTS}")


def pickle_refusal(name: str) -> str:
    return f"the weights are in {name}, which may contain code; save them as {WEIGHTS}"


@dataclass(slots=True)
class _Pair:
    a: Tensor | None = None
    b: Tensor | None = None
    is_embedding: bool = False


def _pair_up(found: Mapping[str, Tensor]) -> dict[str, _Pair]:
    """Return module → its two tensors. Others are left to vLLM, which has its own list of what it skips."""
    pairs: dict[str, _Pair] = {}
    for name, tensor in found.items():
        ending = next((ending for ending in _KINDS if name.endswith(ending)), None)
        if ending is None:
            continue
        if tensor.dtype not in tensors.NOT_FINITE:
            known = ", ".join(tensors.NOT_FINITE)
            raise AdapterRefused(f"tensor {name} is of type {tensor.dtype}; use one of {known}")
        module = name.removeprefix(_PREFIX).removesuffix(ending)
        pair = pairs.setdefault(module, _Pair(is_embedding="embedding" in ending))
        if _KINDS[ending] == "A":
            pair.a = tensor
        else:
            pair.b = tensor
    if not pairs:
        raise AdapterRefused(f"{WEIGHTS} contains no LoRA tensors, such as ….q_proj.lora_A.weight")
    return pairs


def _check_pair(module: str, pair: _Pair, rank: int, base: BaseModel, config: Mapping[str, object]) -> None:
    if pair.a is None or pair.b is None:
        raise AdapterRefused(f"module {module} has only lora_{'B' if pair.a is None else 'A'}")
    wanted = base.shapes(module)
    if base.is_known and not wanted:
        made_for = _base_name(config)
        raise AdapterRefused(
            f"module {module} is not in the base model {base.name}"
            + (f"; the adapter says it was made for {made_for}" if made_for else "")
        )
    if module.endswith(_FUSED_EXPERTS):
        return  # all experts in one tensor: vLLM handles the sizes
    shape = _matrices(module, pair.a, pair.b, rank)
    if pair.is_embedding:
        shape = shape[::-1]
    fits = shape in wanted or (bool(config.get("fan_in_fan_out")) and shape[::-1] in wanted)
    if wanted and None not in wanted and not fits:
        sizes = " or ".join(f"{known[0]} x {known[1]}" for known in dict.fromkeys(wanted) if known)
        raise AdapterRefused(
            f"module {module} is for a weight of {shape[0]} x {shape[1]}; "
            f"the base model {base.name} has {sizes}"
        )


def _matrices(module: str, a: Tensor, b: Tensor, rank: int) -> Shape:
    """Return the output and input size of B x A."""
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise AdapterRefused(
            f"module {module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not matrices"
        )
    (a_rank, columns), (rows, b_rank) = a.shape, b.shape
    if a_rank != b_rank:
        raise AdapterRefused(f"module {module}: lora_A has rank {a_rank}, lora_B {b_rank}")
    if a_rank != rank:
        raise AdapterRefused(
            f"module {module} has rank {a_rank}, the adapter r = {rank}: vLLM ignores rank_pattern and would "
            "scale it wrongly"
        )
    return rows, columns
