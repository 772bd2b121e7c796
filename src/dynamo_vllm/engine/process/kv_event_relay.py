"""Hears the KV events of ranks on other nodes and hands them on to the router's publisher on this one.

The ranks connect here: a leader has an address that every node knows, a headless node need not have one.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import zmq

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    Socket = zmq.Socket[bytes]


class EventRelay:
    """One thread per rank, inside ZMQ; Python sees no event."""

    def __init__(self, listen: Mapping[int, str], folder: str) -> None:
        self._context = zmq.Context()
        self.addresses = {rank: f"ipc://{folder}/kv-events-{rank}" for rank in listen}
        """Where each rank's events can be heard."""
        pairs = [
            (self._bound(zmq.XSUB, address), self._bound(zmq.XPUB, self.addresses[rank]))
            for rank, address in listen.items()
        ]
        for pair in pairs:
            threading.Thread(target=_pass_on, args=pair, daemon=True, name="kv-events").start()

    def _bound(self, kind: int, address: str) -> Socket:
        made = self._context.socket(kind)
        made.set_hwm(0)  # a lost event would leave the router with a wrong picture for good
        try:
            made.bind(address)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise StartError(
                f"cannot listen for KV events on {address}: {exc.strerror}; "
                "another --kv-event-port may be free, it must be the same on every node"
            ) from exc
        return made

    def close(self) -> None:
        """Idempotent; the threads end."""
        self._context.term()


def _pass_on(ranks: Socket, publisher: Socket) -> None:
    with contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(ranks, publisher)
    ranks.close(linger=0)
    publisher.close(linger=0)
