"""Defines what is measured: the model, the engine flags of every peer, and the stages of load."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dynamo_vllm.models.tiny import make_tiny_model

MODEL_NAME = "bench"
VOCABULARY = (110, 900)
"""Ids that random prompts are drawn from: whole words of the tiny tokenizer, no special tokens."""


TINY_TEXT = "The tiny model (3.4 M parameters, random weights, ASCII words)."
SHAPE_TEXT = "A model of 8B shape (32 layers of width 4096, dummy weights, ASCII words)."
CPU_TEXT = (
    "128 tokens in and 64 out, streamed completions, `bench load` as the client on the same machine; c is "
    "the number of requests in flight. The same vLLM and engine flags for all, float32, the engine in one "
    "process; KV events on for ours and upstream."
)
GPU_TEXT = (
    "Streamed completions, `bench load` as the client on the same host; c is the number of requests in "
    "flight. The same vLLM and engine flags for all, bfloat16, CUDA graphs; KV events on for ours and "
    "upstream."
)


@dataclass(frozen=True)
class Stage:
    concurrency: int
    requests: int
    input_tokens: int = 128
    output_tokens: int = 64
    seconds: float | None = None
    """Instead of a number of requests."""

    @property
    def name(self) -> str:
        return f"c={self.concurrency}"

    @property
    def warmup(self) -> int:
        """Requests before the measured ones: each connection once, and a batch of the stage's size."""
        return self.concurrency


@dataclass(frozen=True)
class Setting:
    name: str
    model: Path
    flags: tuple[str, ...]
    stages: tuple[Stage, ...]
    text: str
    """What is measured, for the reader of the tables."""
    block_size: int = 32
    variables: dict[str, str] = field(default_factory=dict)
    start_seconds: float = 300

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "flags": list(self.flags),
            "variables": dict(self.variables),
            "stages": [dataclasses.asdict(stage) for stage in self.stages],
            "text": self.text,
        }

    def environment(self) -> dict[str, str]:
        """The same for every peer: loopback only, nothing left over from the shell."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DYN_", "PROMETHEUS_", "OTEL_"))}
        return kept | LOOPBACK | self.variables


LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "zmq",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_TCP_RESPONSE_STREAM_HOST": "127.0.0.1",
    "DYN_EVENT_PLANE_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_VLLM_BIND_HOST": "127.0.0.1",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
}
COMMON_FLAGS = ("--max-model-len", "2048", "--block-size", "32", "--max-num-seqs", "256")
CPU_FLAGS = (
    *COMMON_FLAGS,
    "--enable-prefix-caching",
    "--enforce-eager",
    "--dtype",
    "float32",
    "--distributed-executor-backend",
    "uni",
)
CPU_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One core is left for the server and the client, as vLLM's own choice of cores does. With a thread on
    # every core they wait for each other by spinning: on two busy cores half the speed, at twice the CPU.
    "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1)),
    "CUDA_VISIBLE_DEVICES": "",
    # vLLM 0.30 takes no other sign that "uni" is meant on CPU; the engine core stays a process of its own.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
GPU_FLAGS = (*COMMON_FLAGS, "--enable-prefix-caching", "--dtype", "bfloat16")


def cpu_setting(folder: Path, stages: tuple[Stage, ...]) -> Setting:
    """On CPU all run the engine in one process: ours does so by itself, the others are told to."""
    model = make_tiny_model(folder / "tiny")
    return Setting("cpu", model, CPU_FLAGS, stages, f"{TINY_TEXT} {CPU_TEXT}", variables=CPU_VARIABLES)


def gpu_setting(name: str, folder: Path, stages: tuple[Stage, ...]) -> Setting:
    """Small shares of the card, so that all servers can be up; the same cache for all, and never full."""
    model = GPU_MODELS[name]
    memory = (
        *("--gpu-memory-utilization", str(model.share)),
        *("--kv-cache-memory-bytes", str(model.cache_gib << 30)),
    )
    flags = (*GPU_FLAGS, *memory, *model.flags)
    return Setting(
        name, model.make(folder / name), flags, stages, f"{model.text} {GPU_TEXT}", start_seconds=200
    )


def rehearsal(name: str, folder: Path, stages: tuple[Stage, ...]) -> Setting:
    """The setting of a GPU on a CPU: the same steps with a small model, to see that they run."""
    model, small = GPU_MODELS[name], folder / f"{name}-small"
    made = make_tiny_model(small) if name == "tiny" else make_8b_shape(small, **SMALL_SHAPE)
    text = f"REHEARSAL on CPU of: {model.text}"
    return Setting(name, made, (*CPU_FLAGS, *model.flags), stages, text, variables=CPU_VARIABLES)


# -- a model of 8B shape -----------------------------------------------------------------------------

SHAPE_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 32_000,
}


SMALL_SHAPE = {
    "head_dim": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
}


def make_8b_shape(folder: Path, **changes: int) -> Path:
    """Config and tokenizer only, for `--load-format dummy`: every id decodes to an ASCII word."""
    tiny = make_tiny_model(folder.with_name("tiny"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPE_8B | changes, indent=1))
    for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    tokenizer = json.loads((tiny / "tokenizer.json").read_bytes())
    words = tokenizer["model"]["vocab"]
    # No merge leads to the new words: prompts never use them, answers do.
    for number in range(len(words), SHAPE_8B["vocab_size"]):
        words[f"\u0120w{number}"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    return folder


@dataclass(frozen=True)
class GpuModel:
    make: Callable[[Path], Path]
    share: float
    cache_gib: int
    flags: tuple[str, ...]
    text: str


GPU_MODELS = {
    "tiny": GpuModel(make_tiny_model, 0.15, 8, (), TINY_TEXT),
    # 128 requests of 640 tokens take 10 GiB of cache; four servers of 29 GiB fit on a card of 139.
    "8b": GpuModel(make_8b_shape, 0.21, 11, ("--load-format", "dummy"), SHAPE_TEXT),
}
