"""Which workers may be forked from a process that has imported vLLM."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from dynamo_vllm.config import forks
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.engine.process import preload
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.supervise.process.held import Held
from dynamo_vllm.supervise.process.zygote import WorkerZygote

OPTIONS = WorkerOptions(model="m")


def test_plain_worker_may_and_others_start_afresh_for_a_reason() -> None:
    assert forks.why_not_forked(OPTIONS, {}) is None
    assert forks.why_not_forked(OPTIONS, {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}) is None
    for options, environment, why in (
        (dataclasses.replace(OPTIONS, fork=False), {}, "--no-fork"),
        (dataclasses.replace(OPTIONS, omni=True), {}, "vLLM-Omni"),
        (dataclasses.replace(OPTIONS, engine="fake"), {}, "does not run vLLM"),
        (OPTIONS, {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, "VLLM_WORKER_MULTIPROC_METHOD=spawn"),
        (OPTIONS, {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}, "VLLM_CPU_OMP_THREADS_BIND"),
    ):
        assert why in (forks.why_not_forked(options, environment) or "")


async def test_worker_with_another_environment_does_not_fit(tmp_path: Path) -> None:
    own = {"PATH": "/bin", "DYN_NAMESPACE": "a", "CUDA_VISIBLE_DEVICES": "0"}
    zygote = WorkerZygote(own, [], tmp_path / "log", lambda _: None)
    assert zygote.fits({**own, "DYN_NAMESPACE": "b", "CUDA_VISIBLE_DEVICES": "1"})
    assert not zygote.fits({**own, "VLLM_LOGGING_LEVEL": "DEBUG"})
    assert not zygote.fits({"PATH": "/bin:/usr/bin"})


def test_architectures_are_read_from_a_local_model_only(tmp_path: Path) -> None:
    assert preload.architectures_of(str(make_tiny_model(tmp_path / "tiny"))) == ["Qwen3ForCausalLM"]
    assert preload.architectures_of("team/model") == []
    Path(tmp_path, "config.json").write_text("[]")
    assert preload.architectures_of(str(tmp_path)) == []


async def test_adopted_process_is_waited_for_and_told_to_end() -> None:
    pid = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)  # noqa: ASYNC221  # it returns at once
    adopted = Held(pid)
    before = adopted.returncode
    adopted.terminate()
    assert await adopted.wait() == -15
    assert (before, adopted.returncode) == (None, -15)
    adopted.terminate()  # it is gone: nothing happens
    adopted.release()
