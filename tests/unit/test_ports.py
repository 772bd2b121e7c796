"""Tests the ports that are reserved for vLLM."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from dynamo_vllm import ports
from dynamo_vllm.errors import StartError

IP_LOCAL_PORT_RANGE = 51  # of Linux 6.3 and later; this Python's socket module does not name it


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    yield
    while ports._kept:
        ports._kept.pop().close()


def listen(port: int, share: bool) -> None:
    with socket.socket() as made:
        if share:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(("127.0.0.1", port))
        made.listen()


def test_ports_are_consecutive_and_nobody_elses() -> None:
    firsts = [ports.reserve_in_a_row(3), ports.reserve_in_a_row(3)]
    found = [first + offset for first in firsts for offset in range(3)]
    found.append(ports.reserve_in_a_row(1))
    assert len(set(found)) == 7
    for port in found:
        with pytest.raises(OSError, match="in use"):
            listen(port, share=False)


def test_zmq_can_listen_on_a_reserved_port() -> None:
    """Listens as ZMQ does in vLLM, with SO_REUSEADDR."""
    first = ports.reserve_in_a_row(2)
    for port in (first, first + 1):
        listen(port, share=True)
        ports.refuse_taken("--side-channel-port", "127.0.0.1", port)


def test_one_reserved_port_suits_the_runtime_and_is_nobody_elses() -> None:
    with ports.reserve() as one, ports.reserve() as other:
        port = ports.number(one)
        assert port != ports.number(other)
        assert port <= 32767
        with pytest.raises(OSError, match="in use"):
            listen(port, share=False)
        listen(port, share=True)
    listen(port, share=False)


def test_another_process_does_not_get_a_reserved_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two `serve`s that begin to look at the same port."""
    with ports.reserve() as one:
        first = ports.number(one)
        monkeypatch.setattr(ports, "_candidates", iter(range(first - 20000, first - 19000)))
        with ports.reserve() as other:
            assert ports.number(other) != first


def test_named_ports_are_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    with ports.reserve() as one:
        first = ports.number(one)
    monkeypatch.setattr(ports, "_candidates", iter(range(first - 20000, first - 19000)))
    monkeypatch.setattr(ports, "_named", set())
    ports.leave_out(range(first, first + 50))
    with ports.reserve() as other:
        assert ports.number(other) not in range(first, first + 50)


def test_no_outgoing_connection_gets_a_reserved_port() -> None:
    """Uses a port range without any other free port."""
    first = ports.reserve_in_a_row(1)
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
            ports.refuse_taken("--side-channel-port", "127.0.0.1", port)
