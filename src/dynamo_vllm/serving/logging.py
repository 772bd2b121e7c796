"""Formats one line per record on stderr, in the form of the runtime's own lines."""

from __future__ import annotations

import logging
import time

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)5s %(name)s: %(message)s%(trace)s"
_OF_A_REQUEST = "request %s"
trace_ids: dict[str, str] = {}
"""Trace ids of the running traced requests, by request id."""


def set_up(level: str) -> None:
    handler = logging.StreamHandler()
    formatter = logging.Formatter(_FORMAT, "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    handler.addFilter(add_trace)
    root = logging.getLogger("dynamo_vllm")
    root.handlers[:] = [handler]
    root.propagate = False
    root.setLevel(level.upper())


def add_trace(record: logging.LogRecord) -> bool:
    """Put the request id first and the trace id last, whoever wrote the line."""
    record.trace = ""
    is_about_one = isinstance(record.msg, str) and record.msg.startswith(_OF_A_REQUEST)
    if trace_ids and is_about_one and isinstance(record.args, tuple) and record.args:
        found = trace_ids.get(str(record.args[0]).partition("#")[0])
        record.trace = f" trace_id={found}" if found else ""
    return True
