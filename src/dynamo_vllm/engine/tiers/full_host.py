"""Says now and then that caches are lost because the host memory is full; vLLM says it for each request."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LOGGER = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
VLLM_SAYS = "Request %s: cannot store chunks"
_SECONDS = 600.0


class FullHost(logging.Filter):
    """Lets one line through in ten minutes, and says in it what to do."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._next = clock, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg != VLLM_SAYS:
            return True
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + _SECONDS
        record.msg = (
            "the host memory for KV caches is full of blocks that are in use or wait for the disk: some "
            "caches are not kept (vllm:kv_offload_allocation_failure counts them); a larger --kv-offload-gb "
            "or a faster disk helps"
        )
        record.args = ()
        return True


def install() -> None:
    """Takes effect in this process, which is the one of the engine's scheduler."""
    logger = logging.getLogger(LOGGER)
    if not any(isinstance(one, FullHost) for one in logger.filters):
        logger.addFilter(FullHost())
