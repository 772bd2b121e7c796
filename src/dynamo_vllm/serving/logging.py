"""One line per record on stderr, in the shape of the runtime's own lines."""

from __future__ import annotations

import logging
import time

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)5s %(name)s: %(message)s"


def set_up(level: str) -> None:
    handler = logging.StreamHandler()
    formatter = logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger("dynamo_vllm")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())
