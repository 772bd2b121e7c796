"""What the sockets of the Rust runtime are given, on listeners of our own."""

from __future__ import annotations

import socket

from dynamo_vllm.serving import listeners


def accepted_from(server: socket.socket) -> socket.socket:
    with socket.create_connection(server.getsockname()):
        accepted, _ = server.accept()
        return accepted


def test_accepted_connections_inherit_no_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listeners.set_no_delay(server.getsockname()[1])
        with accepted_from(server) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_no_listener_no_delay() -> None:
    assert not listeners.set_no_delay(1)


def test_accepted_connections_notice_a_lost_machine_within_20_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listeners.notice_lost_machines()
        with accepted_from(server) as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            idle, every, times = (
                accepted.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert 10 < idle + every * times < 20
