"""Ends a process of vLLM with the worker that started it.

vLLM 0.30 leaves an engine core running when its parent is killed; it would keep a GPU's memory for good.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "DYN_VLLM_ENGINE_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """In a child of the process that PARENT_VARIABLE names, ask the kernel to end us with it.

    And our own children with us: the workers of several shards outlive a killed engine core too.
    """
    if sys.platform != "linux" or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.setpgid(0, 0)
