"""Tests that we read the flags of several nodes as vLLM does, and pass vLLM what it needs. Loads no model."""

from __future__ import annotations

import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.engine.coordinator import DPCoordinator, DPCoordinatorProc
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from dynamo_vllm.engine.patches import coordinator
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.engine.vllm import arguments as vllm_arguments
from dynamo_vllm.errors import ConfigError
from dynamo_vllm.models.tiny import make_tiny_model
from harness.settings import with_flags

AT = ("--data-parallel-address", "10.0.0.1")
MASTER = ("--master-addr", "10.0.0.1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("m") / "tiny"))


def settings(model: str, *argv: str, headless: bool = False) -> EngineSettings:
    return with_flags(EngineSettings(model=model), "--max-model-len", "64", *argv, headless=headless)


@pytest.mark.parametrize(
    ("headless", "argv"),
    [
        (False, ()),
        (False, ("-dp", "2")),
        (False, ("-dp", "4", "-dpl", "1", *AT, "-dpp", "4000")),
        (True, ("-dp", "4", "-dpl", "2", "-dpr", "2", *AT)),
        (False, ("-dp", "4", "-dpl", "2", "--data-parallel-hybrid-lb", *AT)),
        (False, ("-dp", "4", "-dpl", "2", "-dpr", "2", *AT)),
        (False, ("-tp", "2", "-n", "2", "-r", "0", *MASTER)),
        (False, ("-tp", "2", "-n", "2", "-r", "1", *MASTER, "--master-port", "4000")),
        (False, ("-dp", "4", "-n", "2", "-r", "1", *MASTER)),
        *((False, ("-dp", "2", "-tp", "2", "-n", "4", "-r", str(rank), *MASTER)) for rank in range(4)),
    ],
)
def test_flags_of_nodes_are_read_as_vllm_reads_them(
    model: str, headless: bool, argv: tuple[str, ...]
) -> None:
    made = settings(model, *argv, headless=headless)
    config: Any = vllm_arguments.create_config(vllm_arguments.resolve(made).args, made)
    parallel = config.parallel_config
    node = made.node
    assert (node.all_ranks, node.local_ranks) == (
        parallel.data_parallel_size,
        parallel.data_parallel_size_local,
    )
    assert node.first_rank == parallel.data_parallel_rank
    assert node.serves_own_ranks == parallel.local_engines_only
    assert node.nodes_per_rank == parallel.nnodes_within_dp
    assert node.runs_ranks == (parallel.node_rank_within_dp == 0)
    if node.all_ranks > 1:
        assert (node.leader, node.port) == (parallel.data_parallel_master_ip, parallel.data_parallel_rpc_port)
    else:
        assert (node.leader, node.port) == (parallel.master_addr, parallel.master_port)


@pytest.mark.parametrize(
    "argv", [("-dp", "2", "--data-parallel-rank", "1"), ("-dp", "2", "-dpl", "1", "-dpr", "1", *AT)]
)
def test_ranks_of_a_dense_model_are_not_shared_out_one_by_one(model: str, argv: tuple[str, ...]) -> None:
    made = settings(model, *argv)
    with pytest.raises(ConfigError, match="MoE"):
        vllm_arguments.create_config(vllm_arguments.resolve(made).args, made)


def test_headless_parts_take_what_we_give() -> None:
    given = {"local_engine_count", "start_index", "local_start_index", "vllm_config", "local_client"}
    given |= {"handshake_address", "executor_class", "log_stats"}
    assert given <= set(inspect.signature(CoreEngineProcManager.__init__).parameters)
    assert {"vllm_config", "monitor_workers"} <= set(inspect.signature(MultiprocExecutor.__init__).parameters)
    assert "workers" in Path(inspect.getfile(MultiprocExecutor)).read_text()


def test_coordinator_is_started_through_us(monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(DPCoordinator.__init__)
    assert "target=DPCoordinatorProc.run_coordinator" in source, "vLLM starts it another way"
    original = DPCoordinatorProc.run_coordinator
    monkeypatch.setattr(DPCoordinatorProc, "run_coordinator", staticmethod(original))
    monkeypatch.delattr(DPCoordinatorProc, coordinator._UNGUARDED, raising=False)
    coordinator.apply()
    assert pickle.loads(pickle.dumps(DPCoordinatorProc.run_coordinator)) is coordinator.run_coordinator
    assert getattr(DPCoordinatorProc, coordinator._UNGUARDED) is original
    delattr(DPCoordinatorProc, coordinator._UNGUARDED)
