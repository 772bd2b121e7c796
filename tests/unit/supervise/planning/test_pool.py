"""More workers of a running `serve`: their names, ports and GPUs, and what refuses them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from dynamo_vllm.cli.start import serve
from dynamo_vllm.config.rules import kv_tiers
from dynamo_vllm.config.topology import Topology, WorkerGroup
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise.planning import group_names, plan, shared_gpus
from dynamo_vllm.supervise.planning.process import Plan, Process, WorkerPool
from harness.processes import free_ports

DISCOVERY = Path("/run/x/discovery")
FAKE = {"engine": "fake"}


def made(*words: str, gpus: Sequence[str] = ()) -> Plan:
    _, wanted = serve.understand(words, {})
    return plan.make(wanted, {}, DISCOVERY, gpus)


def pool_of(found: Plan) -> WorkerPool:
    assert found.pool is not None
    return found.pool


def names(found: Sequence[Process]) -> list[str]:
    return [process.name for process in found]


def gpus_of(found: Sequence[Process]) -> list[str | None]:
    return [process.env.get("CUDA_VISIBLE_DEVICES") for process in found]


# --- names of groups ------------------------------------------------------------------------------------


def named(*groups: WorkerGroup, model: str | None = "m") -> list[str | None]:
    return [group.name for group in group_names.named(Topology(model=model, workers=groups), {}).workers]


def test_group_is_called_as_its_processes_or_as_its_model_unless_it_has_a_name() -> None:
    assert list(pool_of(made("m", "--prefill", "1", "--decode", "2")).groups) == ["prefill", "decode"]
    assert list(pool_of(made("m", "--workers", "3")).groups) == ["worker"]
    groups = (
        WorkerGroup(options={**FAKE, "model": "/models/a b"}),
        WorkerGroup(options={**FAKE, "model": "org/b", "served_model_name": ("bee",)}),
        WorkerGroup(options={**FAKE, "model": "/models/a b"}),
        WorkerGroup(options={**FAKE, "disaggregation_mode": "prefill"}),
    )
    assert named(*groups) == ["a-b", "bee", "a-b.2", "prefill"]
    assert named(WorkerGroup(name="worker"), WorkerGroup()) == ["worker", "worker.2"]


def test_group_that_is_split_over_gpus_has_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_gpus, "weight_bytes", lambda folder: 1 << 30)
    small = WorkerGroup(options={"model": "small", "disaggregation_mode": "pooling"}, name="small")
    wanted = group_names.named(Topology(model="m", workers=(WorkerGroup(2), small)), {})
    wanted, said = shared_gpus.put_in(wanted, {}, ["0", "1"], 80 << 30)
    assert said is not None
    found = plan.make(wanted, {}, DISCOVERY, ["0", "1"])
    assert [process.group for process in found.workers] == ["worker", "worker", "small"]
    with pytest.raises(ConfigError, match="would take 1.. % of the memory of GPU 0"):
        pool_of(found).more("worker", found.workers, 1)


# --- more of a group ------------------------------------------------------------------------------------


def test_more_workers_are_like_the_others() -> None:
    found = made("m", "--engine", "fake", "--drain-seconds", "7", "--component", "c")
    (first,), (second, third) = found.workers, pool_of(found).more("worker", found.workers, 2)
    assert names([first, second, third]) == ["worker-1", "worker-2", "worker-3"]
    assert first.argv == second.argv == third.argv
    assert (second.drain_seconds, second.role, second.group) == (7.0, "agg", "worker")
    with_engine = made("m")
    (more,) = pool_of(with_engine).more("worker", with_engine.workers, 1)
    assert "DYN_VLLM_ENGINES_HERE" not in with_engine.workers[0].env
    assert more.env["DYN_VLLM_ENGINES_HERE"] == "2"


def test_name_of_an_ended_worker_is_given_again() -> None:
    found = made("m", "--engine", "fake")
    pool = pool_of(found)
    second, third = pool.more("worker", found.workers, 2)
    pool.release(second)
    assert names(pool.more("worker", [*found.workers, third], 2)) == ["worker-2", "worker-4"]


def test_new_worker_gets_a_gpu_that_no_other_has() -> None:
    found = made("m", gpus=["0", "1", "2"])
    pool = pool_of(found)
    assert gpus_of(found.workers) == [None]  # the only one is not told; vLLM takes the first
    more = pool.more("worker", found.workers, 2)
    assert gpus_of(more) == ["1", "2"]
    with pytest.raises(ConfigError, match="worker-4 needs 1, 0 of 3 are left"):
        pool.more("worker", [*found.workers, *more], 1)
    pool.release(more[0])
    assert gpus_of(pool.more("worker", found.workers, 1)) == ["1"]


def test_refused_workers_take_nothing() -> None:
    found = made("m", "-tp", "2", gpus=["0", "1", "2", "3"])
    pool = pool_of(found)
    with pytest.raises(ConfigError, match="worker-3 needs 2, 0 of 4 are left"):
        pool.more("worker", found.workers, 2)
    (more,) = pool.more("worker", found.workers, 1)
    assert (more.name, more.env["CUDA_VISIBLE_DEVICES"]) == ("worker-2", "2,3")


def test_named_ports_go_on_and_come_back_unless_another_program_has_them() -> None:
    first = free_ports(3)
    found = made("m", "--engine", "fake", "--system-port", str(first))
    pool = pool_of(found)
    with (
        socket.create_server(("127.0.0.1", first + 1)),
        pytest.raises(StartError, match=f"--system-port {first + 1}"),
    ):
        pool.more("worker", found.workers, 1)
    second, third = pool.more("worker", found.workers, 2)
    assert names([second, third]) == ["worker-2", "worker-3"]
    assert [second.port, third.port] == [first + 1, first + 2]
    pool.release(second)
    (again,) = pool.more("worker", [*found.workers, third], 1)
    assert again.port == first + 1


def test_tiers_that_do_not_fit_beside_the_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "memory_bytes", lambda: 10 * 10**9)
    monkeypatch.setattr(kv_tiers, "shared_memory_bytes", lambda: 100 * 10**9)
    found = made("m", "--kv-offload-gb", "4")
    pool = pool_of(found)
    (more,) = pool.more("worker", found.workers, 1)
    assert "--kv-offload-gb=4.0" in more.argv
    with pytest.raises(ConfigError, match="12 GB of host memory for the KV caches of all workers"):
        pool.more("worker", [*found.workers, more], 1)


def test_workers_with_engines_on_other_nodes_are_not_multiplied() -> None:
    found = made("m", "-tp", "2", "--nnodes", "2", "--master-addr", "10.0.0.1")
    with pytest.raises(ConfigError, match="share ranks with other nodes"):
        pool_of(found).more("worker", found.workers, 1)
