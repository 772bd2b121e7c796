"""Reads the modules of the base model and the shapes of their weights from its safetensors headers."""

from __future__ import annotations

import json
import logging
import re
from collections import defaultdict
from typing import TYPE_CHECKING

from dynamo_vllm.lora import tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

Shape = tuple[int, int]
"""Out, in: the order of a linear layer's weight in a checkpoint."""

_LAYER = re.compile(r"(?:^|\.)(\w+\.\d+\..+)$")
_PARTS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules that some checkpoints store as one and others in parts."""


class BaseModel:
    """The modules of a model, by the name that an adapter uses; checkpoints may put other prefixes before
    the layers.
    """

    def __init__(self, name: str, weights: Mapping[str, tensors.Tensor | None]) -> None:
        """`weights` by their names in the checkpoint; None if only the name is known."""
        self.name = name
        modules: dict[str, Shape | None] = {}
        for weight, tensor in weights.items():
            module, _, kind = weight.rpartition(".")
            modules[module] = modules.get(module) or (_plain_shape(tensor) if kind == "weight" else None)
        self._shapes: dict[str, list[Shape | None]] = defaultdict(list)
        self._containers: set[str] = set()
        for module, shape in modules.items():
            for name in {module, _tail(module)}:
                self._shapes[name].append(shape)
            for parent in _parents(module):
                self._containers |= {parent, _tail(parent)}

    @property
    def is_known(self) -> bool:
        """Return whether there is anything to compare with."""
        return bool(self._shapes)

    def shapes(self, module: str) -> Sequence[Shape | None]:
        """Return the shapes of all weights this module can mean; None for one without a plain shape. Empty:
        not there."""
        module = module.removesuffix(".base_layer")  # how PEFT distinguishes the two weights of fused experts
        for name in (module, _tail(module)):
            if name in self._shapes:
                return self._shapes[name]
            if name in self._containers:  # such as experts, whose weights are separate
                return [None]
        if module.rpartition(".")[2] == "lm_head":  # tied to the embeddings
            return self._shapes.get("embed_tokens", [])
        return [None] if any(name in self._shapes for name in _other_names(module)) else []


def _plain_shape(tensor: tensors.Tensor | None) -> Shape | None:
    """Return the shape; None for quantised weights and fused experts, which vLLM handles."""
    if tensor is None or tensor.dtype not in tensors.NOT_FINITE or len(tensor.shape) != 2:
        return None
    return tensor.shape[0], tensor.shape[1]


def _tail(module: str) -> str:
    """Strip prefixes: model.language_model.layers.0.mlp.up_proj becomes layers.0.mlp.up_proj."""
    found = _LAYER.search(module)
    return found.group(1) if found else module.rpartition(".")[2]


def _parents(module: str) -> Iterable[str]:
    while module := module.rpartition(".")[0]:
        yield module


def _other_names(module: str) -> Iterable[str]:
    parent, dot, last = _tail(module).rpartition(".")
    yield from (f"{parent}{dot}{part}" for part in _PARTS.get(last, ()))
    yield from (f"{parent}{dot}{whole}" for whole, parts in _PARTS.items() if last in parts)


def read_base_model(folder: Path | None, name: str) -> BaseModel:
    """Read headers only. A model without safetensors gives one that knows nothing."""
    try:
        weights = read_weights(folder) if folder is not None else {}
    except (OSError, ValueError, tensors.BrokenFile) as exc:
        logger.warning("adapters are not compared with %s: %s", name, exc)
        weights = {}
    else:
        if not weights:
            logger.info("adapters are not compared with %s: it has no model.safetensors", name)
    return BaseModel(name, weights)


def read_weights(folder: Path) -> Mapping[str, tensors.Tensor | None]:
    """Return the weights by name; empty for a model without safetensors, None for one in a missing file."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return dict(tensors.read_header(whole))
    if not index.is_file():
        return {}
    places = json.loads(index.read_bytes())["weight_map"]
    found: dict[str, tensors.Tensor | None] = dict.fromkeys(places)
    for shard in sorted(set(places.values())):
        if (folder / shard).is_file():
            found |= tensors.read_header(folder / shard)
    return found
