"""Our engine defaults: each fires in its situation, and what the user set stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config import engine_rules as rules
from dynamo_vllm.config.engine_rules import Fired, Rule, Situation, apply
from dynamo_vllm.engine import machine

CPU, GPU = Situation("cpu"), Situation("cuda")
NIXL = Situation("cuda", nixl=True)
IPC = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "ipc:///run/x/kv-events", "topic": ""}
KVBM = Situation(
    "cuda", has_plain_blocks=True, merged_kv_events="tcp://127.0.0.1:57001", socket_folder="/run/x"
)
MERGED = ["ipc:///run/x/kv-events", "tcp://127.0.0.1:57001", "tcp://127.0.0.1:57001"]
WHISPER = Situation("cpu", source_positions=1500)
TRACED = Situation("cuda", traces_url="http://x:4317")
ENCODES = Situation("cuda", encodes_only=True)
OLD_ARM = Situation(device="cpu", has_bfloat16=False)
HAS_16_GB = Situation("cpu", free_bytes=2**34)
ENGINE = "dynamo_vllm.engine"
GMS_WORKER = "gpu_memory_service.integrations.vllm.worker.GMSWorker"
FIRES: list[tuple[Rule, dict[str, Any], Situation, str, object]] = [
    (rules.prefix_caching, {}, CPU, "enable_prefix_caching", True),
    (rules.block_size, {}, CPU, "block_size", 32),
    (rules.cpu_cache, {}, HAS_16_GB, "kv_cache_memory_bytes", 2**32),
    (rules.cpu_cache, {}, Situation("cpu", free_bytes=2**40), "kv_cache_memory_bytes", 2**33),
    (rules.cpu_cache, {}, Situation("cpu", free_bytes=5), "kv_cache_memory_bytes", 2**28),
    (rules.cpu_cache, {"num_gpu_blocks_override": 64}, HAS_16_GB, "kv_cache_memory_bytes", 2**32),
    (rules.cpu_cache, {}, dataclasses.replace(HAS_16_GB, engines=4), "kv_cache_memory_bytes", 2**30),
    (rules.cpu_cache, {}, Situation("cpu", free_bytes=2**40, engines=4), "kv_cache_memory_bytes", 2**33),
    (rules.cpu_cache, {}, Situation("cpu", free_bytes=2**34, engines=99), "kv_cache_memory_bytes", 2**28),
    (rules.cpu_threads, {}, Situation("cpu", cores=1), "OMP_NUM_THREADS", 1),
    (rules.cpu_threads, {}, Situation("cpu", cores=2), "OMP_NUM_THREADS", 1),
    (rules.cpu_threads, {}, Situation("cpu", cores=8), "OMP_NUM_THREADS", 7),
    (rules.cpu_threads, {}, Situation("cpu", cores=8, engines=3), "OMP_NUM_THREADS", 2),
    (rules.cpu_threads, {}, Situation("cpu", cores=8, engines=9), "OMP_NUM_THREADS", 1),
    (rules.cpu_eager, {}, CPU, "enforce_eager", True),
    (rules.gpu_memory_service, {"load_format": "gms"}, GPU, "worker_cls", GMS_WORKER),
    (rules.dtype, {}, OLD_ARM, "dtype", "float32"),
    (rules.runner, {}, GPU, "runner", "generate"),
    (rules.whole_sounds, {}, WHISPER, "max_num_batched_tokens", 2048),
    (
        rules.whole_sounds,
        {"max_num_seqs": 2},
        Situation("cuda", source_positions=3000),
        "max_num_batched_tokens",
        3000,
    ),
    (rules.sound_cache, {}, WHISPER, "mm_processor_cache_gb", 0),
    (rules.request_logging, {}, GPU, "enable_log_requests", False),
    (rules.nixl_executor, {}, NIXL, "distributed_executor_backend", "mp"),
    (rules.cpu_executor, {}, CPU, "distributed_executor_backend", "uni"),
    (rules.traces, {}, TRACED, "otlp_traces_endpoint", "http://x:4317"),
    (rules.kv_events, {}, Situation("cpu", socket_folder="/run/x"), "kv_events_config", IPC),
    (rules.merged_kv_events, {}, KVBM, "additional_config", {"consolidator_endpoints": MERGED}),
    (
        rules.merged_kv_events,
        {
            "additional_config": {"mine": 1},
            "kv_events_config": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"},
        },
        KVBM,
        "additional_config",
        {"mine": 1, "consolidator_endpoints": ["tcp://127.0.0.1:5557", *MERGED[1:]]},
    ),
    (rules.hybrid_cache, {}, KVBM, "disable_hybrid_kv_cache_manager", True),
    (
        rules.prefix_caching,
        {"enable_prefix_caching": True},
        Situation("cpu", encodes_only=True),
        "enable_prefix_caching",
        False,
    ),
    (rules.unchunked_prefill, {}, ENCODES, "enable_chunked_prefill", False),
    (rules.encoded_media, {}, Situation("cuda", takes_encoded=True), "enable_mm_embeds", True),
    (rules.lora, {}, Situation("cuda", lora=True), "enable_lora", True),
    (rules.lora_slots, {"enable_lora": True}, GPU, "max_loras", 4),
    (rules.lora_slots, {}, Situation("cuda", lora=True), "max_loras", 4),
    (rules.lora_slots, {"enable_lora": True}, CPU, "max_loras", 5),
    (rules.lora_slots, {"enable_lora": True, "max_loras": 2}, CPU, "max_loras", 3),
    (
        rules.memory_reports,
        {"enable_sleep_mode": True},
        GPU,
        "worker_extension_cls",
        f"{ENGINE}.process.gpu_memory.MemoryExtension",
    ),
    (rules.cpu_patches, {}, CPU, "worker_extension_cls", f"{ENGINE}.patches.cpu_worker.CpuWorkerExtension"),
]
SILENT: list[tuple[Rule, dict[str, Any], Situation]] = [
    (rules.prefix_caching, {}, WHISPER),
    (rules.whole_sounds, {}, CPU),
    (rules.whole_sounds, {}, Situation("cuda", source_positions=1500)),
    (rules.whole_sounds, {"max_num_batched_tokens": 4096}, WHISPER),
    (rules.sound_cache, {}, CPU),
    (rules.sound_cache, {"mm_processor_cache_gb": 1}, WHISPER),
    (rules.gpu_memory_service, {"load_format": "auto"}, GPU),
    (rules.gpu_memory_service, {"load_format": "gms", "worker_cls": "mine"}, GPU),
    (rules.unchunked_prefill, {}, GPU),
    (rules.encoded_media, {}, GPU),
    (rules.encoded_media, {"enable_mm_embeds": False}, Situation("cuda", takes_encoded=True)),
    (rules.lora, {}, GPU),
    (rules.lora, {"enable_lora": True}, Situation("cuda", lora=True)),
    (rules.lora_slots, {}, CPU),
    (rules.lora_slots, {"enable_lora": True, "max_loras": 2}, GPU),
    (rules.lora_slots, {"enable_lora": False}, Situation("cpu", lora=True)),
    (rules.traces, {}, GPU),
    (rules.traces, {"otlp_traces_endpoint": "x"}, TRACED),
    (rules.memory_reports, {}, GPU),
    (rules.memory_reports, {"enable_sleep_mode": True, "worker_extension_cls": "mine.Own"}, GPU),
    (rules.prefix_caching, {"enable_prefix_caching": False}, CPU),
    (rules.block_size, {"block_size": 64}, CPU),
    (rules.block_size, {}, GPU),
    (rules.cpu_cache, {}, CPU),
    (rules.cpu_cache, {}, Situation("cuda", free_bytes=2**34)),
    (rules.cpu_cache, {"kv_cache_memory_bytes": 1}, HAS_16_GB),
    (rules.cpu_cache, {"gpu_memory_utilization": 0.5}, HAS_16_GB),
    (rules.cpu_threads, {}, CPU),
    (rules.cpu_threads, {}, Situation("cuda", cores=8)),
    (rules.cpu_eager, {}, GPU),
    (rules.cpu_eager, {"enforce_eager": False}, CPU),
    (rules.cpu_eager, {"compilation_config": {"mode": 3}}, CPU),
    (rules.runner, {"runner": "pooling"}, GPU),
    (rules.request_logging, {"enable_log_requests": True}, GPU),
    (rules.nixl_executor, {}, GPU),
    (rules.nixl_executor, {}, Situation("cpu", nixl=True)),
    (rules.cpu_executor, {}, NIXL),
    (rules.cpu_executor, {"distributed_executor_backend": "mp"}, CPU),
    (rules.cpu_executor, {}, Situation("cpu", binds_threads=True)),
    (rules.cpu_executor, {"tensor_parallel_size": 2}, CPU),
    (rules.cpu_executor, {"nnodes": 2}, CPU),
    (rules.nixl_executor, {"tensor_parallel_size": 2}, NIXL),
    (rules.nixl_executor, {"pipeline_parallel_size": 2}, NIXL),
    (rules.nixl_executor, {"distributed_executor_backend": "ray"}, NIXL),
    (rules.nixl_executor, {"distributed_executor_backend": "uni"}, NIXL),
    (rules.dtype, {}, CPU),
    (rules.dtype, {}, GPU),
    (rules.dtype, {"dtype": "bfloat16"}, OLD_ARM),
    (rules.kv_events, {"kv_events_config": "{}"}, CPU),
    (rules.kv_events, {"enable_prefix_caching": False}, CPU),
    (rules.kv_events, {}, Situation("cpu", publishes_kv_events=False)),
    (rules.merged_kv_events, {}, GPU),
    (rules.merged_kv_events, {"additional_config": {"consolidator_endpoints": []}}, KVBM),
    (rules.merged_kv_events, {"enable_prefix_caching": False}, KVBM),
    (rules.merged_kv_events, {"kv_events_config": {"enable_kv_cache_events": False}}, KVBM),
    (
        rules.merged_kv_events,
        {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
        KVBM,
    ),
    (rules.merged_kv_events, {}, dataclasses.replace(KVBM, publishes_kv_events=False)),
    (rules.hybrid_cache, {}, NIXL),
    (rules.hybrid_cache, {"disable_hybrid_kv_cache_manager": False}, KVBM),
    (rules.cpu_patches, {}, GPU),
    (rules.cpu_patches, {"worker_extension_cls": "mine.Worker"}, CPU),
]


def test_rule_sets_its_default_with_a_reason_and_leaves_what_the_user_set() -> None:
    for rule, user, at, argument, value in FIRES:
        (fired,) = [fired for fired in apply(user, at) if fired.argument == argument]
        assert (fired.value, bool(fired.reason)) == (value, True), rule
        assert rule(user, at) == fired
    for rule, user, at in SILENT:
        assert rule(user, at) is None, (rule, user, at)
    assert {case[0] for case in FIRES} == {case[0] for case in SILENT} == set(rules.RULES)
    assert str(Fired("block_size", 32, "because")) == "block_size = 32: because"


@pytest.mark.parametrize(
    ("user", "at", "endpoint"),
    [
        ({}, Situation("cuda", kv_event_port=20080), "tcp://[::ffff:127.0.0.1]:20080"),
        ({"data_parallel_size": 2}, Situation("cpu", kv_event_port=20080), "tcp://[::ffff:127.0.0.1]:20080"),
        ({}, Situation("cpu", kv_event_port=20080, kv_event_host="10.0.0.1"), "tcp://10.0.0.1:20080"),
    ],
    ids=["of one", "of ranks", "of a headless node, to its leader"],
)
def test_kv_events_go_over_a_port_when_one_is_named(
    user: dict[str, object], at: Situation, endpoint: str
) -> None:
    fired = rules.kv_events(user, at)
    assert fired is not None and fired.value["endpoint"] == endpoint


@pytest.mark.parametrize(
    ("text", "found"),
    [("MemTotal:  9 kB\nMemAvailable:    12 kB\n", 12 * 1024), ("MemTotal: 9 kB\n", None), (None, None)],
)
def test_free_memory_is_what_linux_says(tmp_path: Path, text: str | None, found: int | None) -> None:
    meminfo = tmp_path / "meminfo"
    if text is not None:
        meminfo.write_text(text)
    assert machine.free_bytes(str(meminfo), str(tmp_path)) == found


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "4096\n", "memory.current": "1096\n"}, 3000),
        ({"memory.max": "max\n", "memory.current": "1096\n"}, 10240),
        ({"memory.max": "100\n", "memory.current": "1096\n"}, 0),
        ({"memory/memory.limit_in_bytes": "5000\n", "memory/memory.usage_in_bytes": "1\n"}, 4999),
    ],
)
def test_free_memory_in_a_container_is_within_its_limit(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable: 10 kB\n")
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert machine.free_bytes(str(tmp_path / "meminfo"), str(tmp_path)) == free
