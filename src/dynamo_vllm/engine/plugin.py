"""Loaded by vLLM in each of its processes: an engine core ends with the worker that started it.

vLLM 0.30 leaves the engine core running when its parent is killed; it would keep a GPU's memory for good.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "DYN_VLLM_ENGINE_PARENT"
_PR_SET_PDEATHSIG = 1


def register() -> None:
    """In a child of the process that PARENT_VARIABLE names, ask the kernel to end us with it."""
    if sys.platform != "linux" or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
