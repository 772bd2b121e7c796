"""Tests the ports that are reserved for vLLM."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from dynamo_vllm.engine.process import reserved_ports
from dynamo_vllm.errors import StartError

IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3 and later; this Python's socket module does not name it


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    while reserved_ports._kept:
        reserved_ports._kept.pop().close()


def listen(port: int, share: bool) -> None:
    with socket.socket() as made:
        if share:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen()


def test_reserved_ports_are_consecutive_and_nobody_elses() -> None:
    firsts = [reserved_ports.reserve(3), reserved_ports.reserve(3)]
    found = [first + offset for first in firsts for offset in range(3)]
    found.append(reserved_ports.reserve(1))
    assert len(set(found)) == 7
    for port in found:
        with pytest.raises(OSError, match="in use"):
            listen(port, share=False)


def test_zmq_can_listen_on_a_reserved_port() -> None:
    """Listens as ZMQ does in vLLM, with SO_REUSEADDR."""
    first = reserved_ports.reserve(2)
    for port in (first, first + 1):
        listen(port, share=True)
        reserved_ports.refuse_taken("--side-channel-port", "127.0.0.1", port)


def test_no_outgoing_connection_gets_a_reserved_port() -> None:
    """Uses a port range without any other free port."""
    first = reserved_ports.reserve(1)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        try:
            client.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", first | first << 16))
        except OSError:
            pytest.skip("this kernel cannot narrow the ports of one socket")
        with pytest.raises(OSError, match="Cannot assign"):
            client.connect(server.getsockname())


def test_given_port_that_is_in_use_is_refused_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartError, match=f"--side-channel-port {port} on 127.0.0.1 cannot be used"):
            reserved_ports.refuse_taken("--side-channel-port", "127.0.0.1", port)
