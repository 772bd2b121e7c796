"""Loaded by vLLM in each of its processes: an engine core ends with its worker, and not before.

vLLM 0.30 leaves the engine core running when its parent is killed; it would keep a GPU's memory for good.
And a Ctrl-C in a terminal goes to the whole process group, where the core would drop what the worker drains.
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
    os.setpgid(0, 0)
