"""Tests that KV events of other nodes reach a subscriber on this node."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import zmq

from dynamo_vllm.engine.process.kv_event_relay import EventRelay
from dynamo_vllm.errors import StartError


def free_address() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{s.getsockname()[1]}"


def test_events_of_each_rank_arrive_at_its_own_address(tmp_path: Path) -> None:
    listen = {1: free_address(), 2: free_address()}
    relay = EventRelay(listen, str(tmp_path))
    with zmq.Context() as context:
        ears = {rank: context.socket(zmq.SUB) for rank in listen}
        ranks = {rank: context.socket(zmq.XPUB) for rank in listen}
        for rank, address in listen.items():
            ears[rank].connect(relay.addresses[rank])
            ears[rank].subscribe("")
            ranks[rank].connect(address)  # as vLLM does with an address it cannot listen on
            assert ranks[rank].poll(5000), "the subscription comes through"
            ranks[rank].send_multipart([b"", b"%d" % rank, b"payload"])
        for rank, ear in ears.items():
            assert ear.poll(5000)
            assert ear.recv_multipart() == [b"", b"%d" % rank, b"payload"]
        for end in (*ears.values(), *ranks.values()):
            end.close(linger=0)
    relay.close()
    relay.close()


def test_taken_port_is_refused_with_the_fix(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(StartError, match=f"{address}: .*another --kv-event-port"):
            EventRelay({1: free_address(), 2: address}, str(tmp_path))
