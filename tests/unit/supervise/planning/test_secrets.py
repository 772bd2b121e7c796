"""What of a command line goes as variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_vllm.config.options import FrontendOptions, WorkerOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning import secrets as planning_secrets

NATS = "nats://user:hush@example.org:4222"


@pytest.mark.parametrize(
    ("argv", "kept", "found"),
    [
        ([f"--nats-server={NATS}", "--port=1"], ["--port=1"], {"NATS_SERVER": NATS}),
        (["--nats-server", NATS, "--port", "1"], ["--port", "1"], {"NATS_SERVER": NATS}),
        (["--nats-server=nats://example.org:4222"], ["--nats-server=nats://example.org:4222"], {}),
        (["--port"], ["--port"], {}),
    ],
)
def test_addresses_with_a_password_of_the_frontend(
    argv: list[str], kept: list[str], found: dict[str, str]
) -> None:
    assert planning_secrets.by_environment(FrontendOptions, argv) == (kept, found)


@pytest.mark.parametrize(
    ("argv", "kept", "found"),
    [
        (["--hf-token", "hush", "--dtype", "auto"], ["--dtype", "auto"], {"HF_TOKEN": "hush"}),
        (["--hf-token=hush"], [], {"HF_TOKEN": "hush"}),
        (["--hf-token", "--enforce-eager"], ["--hf-token", "--enforce-eager"], {}),
        (["--admin-token=hush"], [], {"DYN_VLLM_ADMIN_TOKEN": "hush"}),
    ],
)
def test_tokens_of_a_worker(argv: list[str], kept: list[str], found: dict[str, str]) -> None:
    assert planning_secrets.by_environment(WorkerOptions, argv) == (kept, found)


def test_no_process_of_serve_has_a_secret_in_its_command(tmp_path: Path) -> None:
    group = WorkerGroup(options={"nats_server": NATS, "admin_token": "hush"}, args=("--hf-token", "hush"))
    wanted = Topology(model="org/model", frontend={"nats_server": NATS}, workers=(group,))
    made = plan.make(wanted, {}, tmp_path)
    for process in made.processes:
        assert "hush" not in " ".join(process.command(9000, 9001))
        assert process.env["NATS_SERVER"] == NATS
    (worker,) = made.workers
    assert (worker.env["HF_TOKEN"], worker.env["DYN_VLLM_ADMIN_TOKEN"]) == ("hush", "hush")
