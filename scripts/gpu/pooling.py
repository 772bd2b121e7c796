"""Compares pooling models behind this product and behind vLLM's own server: numbers, speed, CPU.

    python scripts/gpu/pooling.py [--shapes small,small-rerank,base,0.6b,rerank] [--rounds 3]
        [--dtype float32] [--out DIR]

Both servers run at the same time and take turns. The weights are random, and the same in both. `small` is two
layers, so that the work around the engine shows; `base` has the shape of a BERT base, `0.6b` that of a small
decoder, `rerank` is a cross-encoder of the shape of `base`, `small-rerank` one of that of `small`. Runs on
GPUs and CPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from harness.pooling_models import make_embedder, make_reranker, words
from harness.processes import COMMAND, free_port
from harness.waiting import until

TEXTS = 200
LONGEST = 2000
START_SECONDS = 300
BERT = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}


@dataclass(frozen=True)
class Load:
    """One `bench pooling`: items of a request, words of an item, requests in flight and of a turn."""

    items: int
    words: int
    concurrency: int
    requests: int


LOADS = {
    "cuda": (Load(64, 64, 8, 96), Load(2048, 32, 2, 8), Load(1, 64, 32, 1500), Load(16, 512, 8, 64)),
    "cpu": (Load(64, 32, 8, 24), Load(2048, 16, 1, 2), Load(1, 32, 8, 300)),
}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="small,small-rerank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args(argv)
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {"device": device}
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory() as name:
            dtype = options.dtype or ("float32" if device == "cpu" else "bfloat16")
            found[shape] = measured(shape, Path(name), device, dtype, options.rounds)
        (options.out / "pooling.json").write_text(json.dumps(found, indent=1))
    return 0


def measured(shape: str, folder: Path, device: str, dtype: str, rounds: int) -> dict[str, Any]:
    model = made(shape, folder / "model")
    flags = ["--max-model-len", "2048", "--dtype", dtype]
    if device == "cuda":
        flags += ["--gpu-memory-utilization", "0.3"]
    else:
        flags += ["--enforce-eager"]
    if shape == "0.6b":
        flags += ["--runner", "pooling", "--load-format", "dummy"]
    with server(folder, "ours", [*COMMAND, "serve", "--no-gateway"], model, flags) as ours:
        vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log"]
        with server(folder, "vllm", vllm, model, flags) as theirs:
            ranks = shape.endswith("rerank")
            equal = scores_differ(ours, theirs) if ranks else embeddings_differ(ours, theirs)
            print(shape, equal, flush=True)
            loads = [bench(load, ours, theirs, folder, rounds, ranks) for load in LOADS[device] if rounds]
            return {"equal": equal, "loads": loads}


def made(shape: str, folder: Path) -> Path:
    if shape.endswith("rerank"):
        return make_reranker(folder, **(BERT if shape == "rerank" else {}))
    if shape in ("small", "base"):
        return make_embedder(folder, **(BERT if shape == "base" else {}))
    make_embedder(folder)  # for its tokenizer
    for name in ("modules.json", "model.safetensors"):
        (folder / name).unlink()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Server:
    name: str
    url: str
    watched: dict[str, int]


@contextmanager
def server(folder: Path, name: str, command: list[str], model: Path, flags: list[str]) -> Iterator[Server]:
    port = free_port()
    url, log = f"http://127.0.0.1:{port}", folder / f"{name}.log"
    argv = [*command, "--model", str(model), "--served-model-name", "tiny", "--port", str(port), *flags]
    # One thread less than cores, as ours has it: else both compute and spin on the same cores.
    threads = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) - 1)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", **threads, **os.environ}
    with log.open("wb") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        until(f"{name} answers", lambda: answers(process, url, log), START_SECONDS)
        yield Server(name, url, watched(process.pid, name))
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in children:
            if child.is_running():
                child.kill()


def answers(process: subprocess.Popen[bytes], url: str, log: Path) -> bool:
    if process.poll() is not None:
        raise RuntimeError(log.read_text()[-3000:])
    try:
        return bool(httpx.get(f"{url}/v1/models", timeout=5).json()["data"])
    except (httpx.HTTPError, ValueError):
        return False


def watched(pid: int, name: str) -> dict[str, int]:
    """Return the process that does the engine's front work: the worker, or the server itself."""
    if name == "vllm":
        return {"vllm.server": pid}
    found: dict[str, int] = {}
    for child in psutil.Process(pid).children(recursive=True):
        line = " ".join(child.cmdline())
        if line.startswith("dynamo-vllm worker") or " worker --" in line:
            found.setdefault("ours.worker", child.pid)
        elif " frontend " in line:
            found["ours.frontend"] = child.pid
    return found


def ask(server: Server, path: str, body: dict[str, Any]) -> Any:
    reply = httpx.post(f"{server.url}{path}", json={"model": "tiny", **body}, timeout=300)
    reply.raise_for_status()
    return reply.json()


def embeddings_differ(ours: Server, theirs: Server) -> dict[str, float]:
    """Return the lowest cosine of 200 texts of 1 to 2000 tokens."""
    chance = random.Random(1)
    texts = [words(max(1, round(LONGEST * chance.random() ** 3)), start) for start in range(TEXTS)]
    one, other = (
        [item["embedding"] for item in ask(server, "/v1/embeddings", {"input": texts})["data"]]
        for server in (ours, theirs)
    )
    return {"lowest_cosine": min(cosine(a, b) for a, b in zip(one, other, strict=True))}


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True)) / (hypot(*one) * hypot(*other))


def scores_differ(ours: Server, theirs: Server) -> dict[str, float]:
    """Return the largest difference of 200 scores, and how many places of the order are other ones."""
    body = {"query": words(6), "documents": [words(1 + 7 * n % 400, n) for n in range(TEXTS)]}
    ranked, theirs_ranked = ask(ours, "/v1/rerank", body), ask(theirs, "/v1/rerank", body)["results"]
    found = {item["index"]: item.get("score", item.get("relevance_score")) for item in ranked}
    wanted = {item["index"]: item["relevance_score"] for item in theirs_ranked}
    places = zip((item["index"] for item in ranked), (item["index"] for item in theirs_ranked), strict=True)
    return {
        "largest_difference": max(abs(found[n] - wanted[n]) for n in wanted),
        "other_places": sum(a != b for a, b in places),
    }


def bench(load: Load, ours: Server, theirs: Server, folder: Path, rounds: int, ranks: bool) -> dict[str, Any]:
    file = folder / "bench.json"
    argv = [*COMMAND, "bench", "pooling", "--rounds", str(rounds), "--json", str(file), "--model", "tiny"]
    argv += ["--items", str(load.items), "--words", str(load.words), "--requests", str(load.requests)]
    argv += ["--concurrency", str(load.concurrency), "--api", "rerank" if ranks else "embeddings"]
    for server in (ours, theirs):
        argv += ["--server", f"{server.name}={server.url}"]
        for label, pid in server.watched.items():
            argv += ["--watch", f"{label}={pid}"]
    print(load, flush=True)
    subprocess.run(argv, check=True)
    return {"load": dataclasses.asdict(load), "turns": json.loads(file.read_text())["turns"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
