"""What the sockets of the Rust runtime are given, on listeners of our own."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from dynamo_vllm.serving.plane import socket_options
from harness import listening
from harness.waiting import until


def accepted_from(server: socket.socket) -> socket.socket:
    with socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        return accepted


def test_accepted_connections_inherit_no_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert socket_options.set_no_delay(server.getsockname()[1])
        with accepted_from(server) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
    assert not socket_options.set_no_delay(1)


def test_accepted_connections_notice_a_lost_machine_within_20_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket_options.notice_lost_machines()
        with accepted_from(server) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, times = (
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert 10 < idle + every * times < 20


def device(found: socket.socket) -> bytes:
    return found.getsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, 16).rstrip(b"\0")


def test_what_listens_everywhere_is_for_this_machine_only() -> None:
    with (
        socket_options.restricted_to_loopback("127.0.0.1", ()),
        socket.create_server(("0.0.0.0", 0)) as server,
    ):
        until("the device", lambda: device(server) == b"lo")
        (found,) = [one for one in listening.listeners([os.getpid()]) if one.port == server.getsockname()[1]]
        assert found.is_for_this_machine
        with accepted_from(server) as accepted:
            assert accepted.getsockname()[0] == "127.0.0.1"


def test_socket_that_does_not_listen_yet_is_looked_at_again() -> None:
    """Between two looks the runtime makes a socket; it may listen only after the second."""
    keeping = socket_options._LoopbackRestriction(set())
    with socket.socket() as server:
        keeping.look()
        server.bind(("0.0.0.0", 0))
        keeping.look()
        server.listen()
        keeping.look()
        assert device(server) == b"lo"


def test_look_that_had_to_wait_for_the_processor_is_followed_by_the_next_one() -> None:
    """As while an engine starts: what it takes is counted, not how long it takes."""
    looks: list[float] = []

    class Waiting(socket_options._LoopbackRestriction):
        def look(self) -> None:
            looks.append(time.monotonic())
            time.sleep(0.2)  # what another thread of this process does to it

    stop = threading.Event()
    keeping = threading.Thread(target=Waiting(set()).run, args=(stop,))
    keeping.start()
    try:
        until("three looks", lambda: len(looks) >= 3, 30)
    finally:
        stop.set()
        keeping.join()


def test_port_that_is_meant_for_others_stays_so() -> None:
    with socket.create_server(("0.0.0.0", 0)) as public, socket.create_server(("0.0.0.0", 0)) as other:
        with socket_options.restricted_to_loopback("127.0.0.1", (public.getsockname()[1], None)):
            until("the other's device", lambda: device(other) == b"lo")
        assert device(public) == b""
        (found,) = [one for one in listening.listeners([os.getpid()]) if one.port == public.getsockname()[1]]
        assert not found.is_for_this_machine


@pytest.mark.parametrize("host", [None, "10.0.0.1"])
def test_process_of_a_cluster_listens_for_others(host: str | None) -> None:
    before = threading.active_count()
    with socket_options.restricted_to_loopback(host, ()):
        assert threading.active_count() == before
