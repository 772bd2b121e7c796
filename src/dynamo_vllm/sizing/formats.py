"""Computes the bytes of a parameter: the model's dtype, and the quantisation of linear layers."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from dynamo_vllm.config.options.size import QUANTISATIONS
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.sizing.parts import Facts, Part, Weight

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of one value."""
CACHE_DTYPES = {"auto": 0, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Of a value in the KV cache; 0 for the model's dtype."""
_BLOCK = 128
_LAYER = re.compile(r"layers\\?\.(\d+)\b")


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """The bytes of weights."""

    dtype: str = "bfloat16"
    quantisation: str = "none"
    linear_bytes: float = 0.0
    """Of one quantised parameter with its share of scales and zero points."""
    experts_only: bool = False
    block: int = 1
    """A rank's part of a quantised layer must be a multiple of it."""
    padded_rows: int = 1
    padded_columns: int = 1
    """Experts are padded to multiples of these on a GPU."""

    @property
    def value_bytes(self) -> int:
        return DTYPES[self.dtype]

    def bytes_of(self, weight: Weight) -> float:
        if weight.is_float32:
            return 4.0 * weight.count
        if not self._takes(weight):
            return float(self.value_bytes * weight.count)
        return (weight.count - weight.bias) * self.linear_bytes + weight.bias * self.value_bytes

    def copy_bytes_of(self, weight: Weight) -> float:
        """The engine's additional copy of a weight."""
        return float(self.value_bytes * weight.count) if weight.copied else 0.0

    def _takes(self, weight: Weight) -> bool:
        if self.quantisation == "none" or not weight.is_linear or weight.part is Part.VISION:
            return False
        return weight.part is Part.EXPERTS or not self.experts_only


def of(config: dict[str, object], source: str, dtype: str | None, quantisation: str | None) -> WeightFormat:
    """As the file says, with the user's overrides."""
    facts = Facts(config, source)
    dtype = dtype or _dtype(facts)
    written = facts.inner("quantization_config")
    if quantisation is None and written is not None:
        found = _written(written, dtype)
        return dataclasses.replace(found, experts_only=True) if _spares_all_else(written, facts) else found
    if quantisation is None:
        return WeightFormat(dtype)
    return _made(quantisation, dtype, experts_only=quantisation == "mxfp4")


def _dtype(facts: Facts) -> str:
    inner = facts.inner("text_config")
    for place in (facts, inner):
        for name in ("torch_dtype", "dtype"):
            if place is not None and place.values.get(name) is not None:
                value = str(place.values[name]).removeprefix("torch.")
                if value not in DTYPES:
                    raise ConfigError(
                        f"{place.source}: {name} {value!r} is unknown; say --dtype {'|'.join(DTYPES)}"
                    )
                # Of a float32 file vLLM's `auto` makes 16 bits.
                return "bfloat16" if value == "float32" else value
    return "bfloat16"


def _made(name: str, dtype: str, *, group: int = _BLOCK, experts_only: bool = False) -> WeightFormat:
    sizes = {
        "none": float(DTYPES[dtype]),
        "fp8": 1.0,
        "fp8-block": 1.0 + 4 / _BLOCK**2,
        "int8": 1.0,
        "int4": 0.5 + (2 + 0.5) / group,
        "mxfp4": 0.5 + 1 / 32,
        "nvfp4": 0.5 + 1 / 16,
        "bnb4": 0.5 + 4 / 64,
        "bnb8": 1.0,
    }
    block = {"fp8-block": _BLOCK, "int4": group}.get(name, 1)
    # vLLM 0.30's Marlin, which takes the most of the kernels for MXFP4.
    rows, columns = (256, 128) if name == "mxfp4" else (1, 1)
    return WeightFormat(dtype, name, sizes[name], experts_only, block, rows, columns)


def _written(facts: Facts, dtype: str) -> WeightFormat:
    """From `quantization_config`."""
    method = facts.text("quant_method")
    if method == "fp8":
        return _made("fp8-block" if facts.list("weight_block_size") else "fp8", dtype)
    if method in ("awq", "gptq"):
        return _integers(facts.positive("bits"), facts.values.get("group_size"), dtype, facts)
    if method == "mxfp4":
        return _made("mxfp4", dtype, experts_only=True)
    if method == "bitsandbytes":
        return _made("bnb4" if facts.flag("load_in_4bit", False) else "bnb8", dtype)
    if method == "modelopt" and facts.values.get("quant_algo") in ("FP8", "NVFP4"):
        return _made(str(facts.values["quant_algo"]).lower(), dtype)
    if method == "compressed-tensors":
        return _compressed(facts, dtype)
    raise _unknown(facts, f"quant_method {method!r}")


def _spares_all_else(written: Facts, facts: Facts) -> bool:
    """Return whether only the experts of a model are quantised: no layer's attention is."""
    values = (facts.inner("text_config") or facts).values
    if not any(values.get(name) for name in ("n_routed_experts", "num_experts", "num_local_experts")):
        return False
    lists = (written.list(name) or () for name in ("ignore", "exclude_modules", "modules_to_not_convert"))
    attention = {str(name) for names in lists for name in names if "self_attn" in str(name)}
    layers = {found[1] for name in attention if (found := _LAYER.search(name))}
    is_everywhere = any(not _LAYER.search(name) for name in attention)
    return is_everywhere or len(layers) == values.get("num_hidden_layers")


def _compressed(facts: Facts, dtype: str) -> WeightFormat:
    groups = facts.inner("config_groups")
    first = next(iter(groups.values.values()), None) if groups is not None else None
    weights = Facts(first, facts.source).inner("weights") if isinstance(first, dict) else None
    if weights is None:
        raise _unknown(facts, "config_groups without weights")
    bits = weights.positive("num_bits")
    if weights.values.get("type") == "float" and bits == 8:
        return _made("fp8-block" if weights.values.get("strategy") == "block" else "fp8", dtype)
    if weights.values.get("type") == "float" and bits == 4:
        return _made("nvfp4", dtype)
    return _integers(bits, weights.values.get("group_size"), dtype, facts)


def _integers(bits: int, group: object, dtype: str, facts: Facts) -> WeightFormat:
    if bits not in (4, 8):
        raise _unknown(facts, f"{bits} bits")
    per_group = group if isinstance(group, int) and group > 0 else _BLOCK
    return _made("int4" if bits == 4 else "int8", dtype, group=per_group)


def _unknown(facts: Facts, what: str) -> ConfigError:
    return ConfigError(
        f"{facts.source}: {what} is not known here; say what it comes to with --quantization "
        f"{'|'.join(QUANTISATIONS)}"
    )
