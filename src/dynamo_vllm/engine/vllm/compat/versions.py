"""Says which versions of vLLM we run with, and what nobody has proven of a newer one. Imports no vLLM.

Whatever depends on the version of vLLM stands in this folder or in the table of patches.
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
"""What the tests of a version show."""
NOT_PROVEN: dict[tuple[int, ...], tuple[str, ...]] = {
    (0, 30): (),
    (0, 31): EVERYTHING,
    (0, 32): EVERYTHING,
}
"""By version; a version that is not here is newer than all that were looked at."""


def refuse_older() -> None:
    """Early, as imports would fail with names that nobody has to know."""
    found = release("vllm")
    if found is not None and found < OLDEST:
        raise StartError(
            f"vLLM {installed('vllm')} is too old, dynamo-vllm needs {_told(OLDEST)} or newer; "
            "run 'make venv', or pip install --upgrade 'dynamo-vllm[cpu]' or 'dynamo-vllm[cuda]'"
        )


def refuse_for_omni() -> None:
    """vLLM-Omni builds on the inside of the vLLM that has its number."""
    vllm, omni = release("vllm"), release("vllm-omni")
    if vllm is not None and omni is not None and vllm != omni:
        raise ConfigError(
            f"--omni: vLLM-Omni {installed('vllm-omni')} needs vLLM {_told(omni)}, not {installed('vllm')}; "
            "run 'make distclean' and 'DYNAMO_VLLM_EXTRAS=omni make venv'"
        )


def warn_of_unproven() -> None:
    if left := unproven():
        newest = max(version for version, parts in NOT_PROVEN.items() if not parts)
        logger.warning(
            "vLLM %s is newer than %s, which all tests were run with; not proven with it: %s",
            installed("vllm"),
            _told(newest),
            ", ".join(left),
        )


def unproven() -> tuple[str, ...]:
    """Of the installed vLLM; nothing where none is installed."""
    found = release("vllm")
    return () if found is None or found < OLDEST else NOT_PROVEN.get(found, EVERYTHING)


def release(package: str) -> tuple[int, ...] | None:
    """Return the version without its last number, which changes no names; None where there is none."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(installed(package) or "").release[:2]
    except InvalidVersion:
        return None


def _told(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))
