"""Ends a process of vLLM when the worker that started it ends.

vLLM 0.30 leaves an engine core running when its parent is killed; it would hold the GPU's memory forever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "DYN_VLLM_ENGINE_PARENT"
_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks the kernel to kill this process when its parent ends, if PARENT_VARIABLE names the parent.

    Its own children then follow the same rule: in vLLM 0.30 shard workers outlive a killed engine core too.
    """
    if sys.platform != "linux" or os.environ.get(PARENT_VARIABLE) != str(os.getppid()):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    os.setpgid(0, 0)
