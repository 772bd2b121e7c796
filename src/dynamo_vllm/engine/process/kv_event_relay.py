"""Relays KV events from ranks on other nodes to the KV event publisher of this node.

The ranks connect to this node: every node knows the leader's address, and a headless node may have none.
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
    """Relays with one thread per rank, which stays inside ZMQ: no event passes through Python."""

    def __init__(self, listen: Mapping[int, str], folder: str) -> None:
        self._context = zmq.Context()
        self.addresses = {rank: f"ipc://{folder}/kv-events-{rank}" for rank in listen}
        """Has the address to subscribe to for each rank's events."""
        pairs = [
            (self._bound(zmq.XSUB, address), self._bound(zmq.XPUB, self.addresses[rank]))
            for rank, address in listen.items()
        ]
        for pair in pairs:
            threading.Thread(target=_relay, args=pair, daemon=True, name="kv-events").start()

    def _bound(self, kind: int, address: str) -> Socket:
        made = self._context.socket(kind)
        made.set_hwm(0)  # after a lost event the router's index of this worker would stay wrong
        try:
            made.bind(address)
        except zmq.ZMQError as exc:
            self._context.destroy(linger=0)
            raise StartError(
                f"cannot listen for KV events on {address}: {exc.strerror}; "
                "choose another --kv-event-port, the same on every node"
            ) from exc
        return made

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._context.term()


def _relay(ranks: Socket, publisher: Socket) -> None:
    with contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(ranks, publisher)
    ranks.close(linger=0)
    publisher.close(linger=0)
