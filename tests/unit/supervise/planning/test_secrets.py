"""What of a command line goes as variables."""

from __future__ import annotations

from pathlib import Path

from dynamo_vllm.config.options import FrontendOptions, WorkerOptions
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.supervise.planning import plan
from dynamo_vllm.supervise.planning import secrets as planning_secrets

NATS = "nats://user:hush@example.org:4222"


def test_addresses_with_a_password_and_tokens_leave_the_words() -> None:
    plain = "--nats-server=nats://example.org:4222"
    cases: list[tuple[type, list[str], list[str], dict[str, str]]] = [
        (FrontendOptions, [f"--nats-server={NATS}", "--port=1"], ["--port=1"], {"NATS_SERVER": NATS}),
        (FrontendOptions, ["--nats-server", NATS, "--port", "1"], ["--port", "1"], {"NATS_SERVER": NATS}),
        (FrontendOptions, [plain], [plain], {}),
        (FrontendOptions, ["--port"], ["--port"], {}),
        (WorkerOptions, ["--hf-token", "hush", "--dtype", "auto"], ["--dtype", "auto"], {"HF_TOKEN": "hush"}),
        (WorkerOptions, ["--hf-token=hush"], [], {"HF_TOKEN": "hush"}),
        (WorkerOptions, ["--hf-token", "--enforce-eager"], ["--hf-token", "--enforce-eager"], {}),
        (WorkerOptions, ["--admin-token=hush"], [], {"DYN_VLLM_ADMIN_TOKEN": "hush"}),
    ]
    for options, argv, left, variables in cases:
        assert planning_secrets.by_environment(options, argv) == (left, variables)


def test_no_process_of_serve_has_a_secret_in_its_command(tmp_path: Path) -> None:
    group = WorkerGroup(options={"nats_server": NATS, "admin_token": "hush"}, args=("--hf-token", "hush"))
    wanted = Topology(model="org/model", frontend={"nats_server": NATS}, workers=(group,))
    made = plan.make(wanted, {}, tmp_path)
    for process in made.processes:
        assert "hush" not in " ".join(process.command(9000, 9001))
        assert process.env["NATS_SERVER"] == NATS
    (worker,) = made.workers
    assert (worker.env["HF_TOKEN"], worker.env["DYN_VLLM_ADMIN_TOKEN"]) == ("hush", "hush")
