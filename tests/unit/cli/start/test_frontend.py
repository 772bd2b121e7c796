"""The frontend's own part around the Rust server."""

from __future__ import annotations

import socket

import pytest

from dynamo_vllm import ports
from dynamo_vllm.cli.start import frontend
from dynamo_vllm.errors import StartError


def test_taken_port_is_refused_by_name() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(StartError, match=f"--port {server.getsockname()[1]}"),
    ):
        ports.refuse_taken("--port", "127.0.0.1", server.getsockname()[1])


@pytest.mark.parametrize(
    ("ready", "leaving", "models", "status"),
    [(True, False, ["m"], 200), (True, False, [], 503), (False, False, ["m"], 503), (True, True, ["m"], 503)],
)
def test_health_is_ready_when_a_model_can_answer(
    ready: bool, leaving: bool, models: list[str], status: int
) -> None:
    class Context:
        def is_ready(self) -> bool:
            return ready

        def is_cancelled(self) -> bool:
            return leaving

        def serving_ready_display_names(self) -> list[str]:
            return models

    assert frontend.health_status(Context()) == status
