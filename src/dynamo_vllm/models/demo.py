"""Finds the demo models of the package; scripts/demo makes them, `serve --demo` serves them."""

from __future__ import annotations

from pathlib import Path

from dynamo_vllm.errors import StartError

ROOT = Path(__file__).parent / "demo"
ADAPTERS = ("lora-capitals", "lora-chinese")
"""Of the chat model."""
NAMES = ("chat", *ADAPTERS, "vision", "image", "embed", "rerank", "speech")
_DESCRIPTIONS = ("config.json", "adapter_config.json", "model_index.json")


def served_name(name: str) -> str:
    """Return the name for clients; folders under build/demo have it too."""
    return f"demo-{name}"


def is_here(name: str) -> bool:
    found = ROOT / name
    described = any((found / file).is_file() for file in _DESCRIPTIONS)
    return described and any(found.rglob("*.safetensors"))


def folder(name: str) -> Path:
    """Return the folder of a model or an adapter."""
    if not is_here(name):
        raise StartError(
            f"the demo model {served_name(name)} is not in {ROOT / name}; install the package again, or in a "
            "checkout make it with 'make demo-models' and 'python scripts/demo install'"
        )
    return ROOT / name
