"""What a KV tier is worth on this machine: reload against recompute, and what it costs without reuse.

    python scripts/gpu/tiers.py [--shape 8b|1.5b|1b|small] [--dtype bfloat16] [--rounds 3] [--out FOLDER]
        [--host-gb 30] [--disk FOLDER:GB] [--lengths 8192,32768] [--parts texts lengths] [--device cpu]

Two workers are up at the same time and take turns: one without tiers, one with. Both have the same small
engine cache. What is measured, and written to FOLDER/tiers-SHAPE-DTYPE.json after each part:
  - link       bytes per second from pinned memory to the GPU, by one copy of 1 GiB
  - texts      prompts that were evicted and came back answer as when they were new
  - lengths    time to the first token of a new prompt, of one whose cache came back, of one recomputed
  - throughput tokens per second with prompts that share nothing
  - turns      conversations of several turns, more of them than the engine cache holds
With --disk, a third worker has a host tier too small for the prompts and reads them from the disk.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from disaggregation import MODEL_NAME, Answer, Process, Stack
from peers.settings import VOCABULARY, make_8b_shape

from harness.processes import COMMAND

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"max_position_embeddings": 40_960},
    "1b": {
        "max_position_embeddings": 40_960,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "1.5b": {  # few KV heads, as Qwen 2.5 has
        "max_position_embeddings": 40_960,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "small": {
        "max_position_embeddings": 40_960,
        "head_dim": 64,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
PARTS = ("texts", "lengths", "throughput", "turns")
LOADED, SECONDS = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_load_time_total"
STORED, STORE_SECONDS = "vllm:kv_offload_store_bytes_total", "vllm:kv_offload_store_time_total"
READ, READ_SECONDS = "vllm:kv_offload_tiering_read_bytes_total", "vllm:kv_offload_tiering_read_time_total"
COUNTERS = (LOADED, SECONDS, STORED, STORE_SECONDS, READ, READ_SECONDS)


@dataclass
class Server:
    """A worker with a frontend of its own."""

    stack: Stack
    worker: Process

    def first_token(self, prompt: list[int]) -> tuple[float, Answer]:
        begun = time.perf_counter()
        answer = self.stack.ask(prompt, 1)
        return time.perf_counter() - begun, answer

    def counters(self) -> dict[str, float]:
        return {name: self.worker.metric(name) for name in COUNTERS}


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"tiers-{options.shape}-{options.dtype}.json"
    found: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(options).items()}}

    def save(name: str, value: object) -> None:
        found[name] = value
        path.write_text(json.dumps(found, indent=1))
        print(f"{name}: {json.dumps(value)}", flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        model = make_8b_shape(Path(temporary, options.shape), **SHAPES[options.shape])
        if options.device == "cuda":
            save("link bytes/s", link())
        stacks: dict[str, Stack] = {}
        try:
            servers = start_all(stacks, options, folder, model)
            save("ready after s", round(time.monotonic() - options.begun, 1))
            if "texts" in options.parts:
                plain = answers(servers["none"], options)
                for name in set(servers) - {"none"}:
                    save(f"texts {name}", texts(servers[name], plain, options))
            for length in options.lengths if "lengths" in options.parts else ():
                save(f"length {length}", reloads(servers, length, options))
            if "throughput" in options.parts:
                save("throughput", throughput(servers, options))
            if "turns" in options.parts:
                save("turns", turns(servers, options))
        except Exception as exc:
            save("failed", f"{type(exc).__name__}: {exc}")
            for process in (process for stack in stacks.values() for process in stack.processes):
                print(f"--- {process.name}", process.last_lines(40), flush=True)
            return 1
        finally:
            for name, stack in stacks.items():
                save(f"end of {name}", stack.stop())
    return 0


def start_all(
    stacks: dict[str, Stack], options: argparse.Namespace, folder: Path, model: Path
) -> dict[str, Server]:
    """Start all servers, and note their stacks before anything can fail."""
    kinds: dict[str, list[str]] = {"none": [], "host": ["--kv-offload-gb", str(options.host_gb)]}
    if options.disk:
        small = options.host_gb / 4  # a long prompt fits, a round does not
        kinds["disk"] = ["--kv-offload-gb", str(small), "--kv-offload-disk", options.disk]
    with ThreadPoolExecutor(len(kinds)) as pool:  # each has its own memory: nothing is measured at the start
        for kind in kinds:
            stacks[kind] = stack_of(kind, options, folder, model)
        made = pool.map(lambda kind: start(stacks[kind], kind, kinds[kind]), kinds)
        return dict(zip(kinds, made, strict=True))


def stack_of(kind: str, options: argparse.Namespace, folder: Path, model: Path) -> Stack:
    here = folder / kind
    here.mkdir(parents=True, exist_ok=True)
    flags = [
        *("--load-format", "dummy", "--dtype", options.dtype),
        *("--max-model-len", str(max(options.lengths) + 2048), "--max-num-seqs", "64"),
        *("--num-gpu-blocks-override", str(options.cache_tokens // options.block_size)),
        *("--block-size", str(options.block_size)),
    ]
    if options.device == "cuda":
        flags += ["--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", str(16 << 30)]
    else:
        flags += ["--enforce-eager", "--gpu-memory-utilization", "0.2"]
    return Stack(here, str(model), [*flags, *options.vllm])


def start(stack: Stack, kind: str, more: list[str]) -> Server:
    stack.start_frontend()
    worker = stack.start_worker(kind, *more)
    stack.wait_for_workers(1)
    return Server(stack, worker)


def link() -> dict[str, float]:
    """The speed of the link in both directions, measured in a process of its own, which frees the GPU."""
    program = """
import json, time, torch
host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
gpu = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
def best(to, source):
    seconds = []
    for _ in range(6):
        torch.cuda.synchronize(); begun = time.perf_counter()
        to.copy_(source, non_blocking=True); torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return (1 << 30) / min(seconds)
print(json.dumps({"to the gpu": best(gpu, host), "from the gpu": best(host, gpu)}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def prompt(seed: str, tokens: int) -> list[int]:
    return random.Random(seed).choices(range(*VOCABULARY), k=tokens)


def answers(server: Server, options: argparse.Namespace) -> list[Answer]:
    """Prompts one after the other, more than the engine cache holds."""
    length = options.cache_tokens // 8
    return [server.stack.ask(prompt(f"text {number}", length), 16) for number in range(12)]


def texts(server: Server, plain: list[Answer], options: argparse.Namespace) -> dict[str, int]:
    """The same prompts twice, and what the server without tiers said."""
    length = options.cache_tokens // 8
    new, again = answers(server, options), answers(server, options)

    def equal(others: list[Answer]) -> int:
        return sum(one.text == other.text for one, other in zip(again, others, strict=True))

    return {
        "prompts": len(new),
        "equal": equal(new),
        "as without tiers": equal(plain),
        "different texts": len({answer.text for answer in new}),
        "cached when new": sum(answer.cached for answer in new),
        "cached again": sum(answer.cached for answer in again),
        "tokens": length * len(new),
    }


def reloads(servers: dict[str, Server], length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Ask new prompts until the first has left the engine cache, then all of them again, in turns."""
    count = options.cache_tokens // length + 2
    found: dict[str, Any] = {}
    for number in range(options.rounds):
        names = list(servers) if number % 2 == 0 else list(reversed(servers))
        asked = [prompt(f"{length} {number} {one}", length) for one in range(count)]
        for name in names:
            server, row = servers[name], found.setdefault(name, {"new": [], "again": [], "cached": []})
            row["new"] += [server.first_token(one)[0] for one in asked]
            before = server.counters()
            for one in asked:
                seconds, answer = server.first_token(one)
                row["again"].append(seconds)
                row["cached"].append(answer.cached)
            grown = {key: value - before[key] for key, value in server.counters().items()}
            row.setdefault("loads", []).append(grown)
    return {name: summary(row) for name, row in found.items()}


def summary(row: dict[str, Any]) -> dict[str, Any]:
    total = {key: sum(one[key] for one in row["loads"]) for key in COUNTERS}

    def speed(moved: str, seconds: str) -> float | None:
        return total[moved] / total[seconds] if total[seconds] else None

    return {
        "new s": statistics.median(row["new"]),
        "again s": statistics.median(row["again"]),
        "again / new": statistics.median(row["again"]) / statistics.median(row["new"]),
        "slowest again s": max(row["again"]),
        "cached tokens": statistics.median(row["cached"]),
        "loaded bytes": total[LOADED],
        "loaded bytes/s": speed(LOADED, SECONDS),
        "read from disk bytes": total[READ],
        "read from disk bytes/s": speed(READ, READ_SECONDS),
    }


def throughput(servers: dict[str, Server], options: argparse.Namespace) -> dict[str, Any]:
    """Prompts that share nothing: the tier stores everything and gives nothing back."""
    words = ["--input-tokens", "512", "--output-tokens", "128", "--concurrency", str(options.concurrency)]
    words += ["--requests", str(options.concurrency * 6), "--warmup", str(options.concurrency)]
    return in_turns(servers, words, options.rounds + 2)


def turns(servers: dict[str, Server], options: argparse.Namespace) -> dict[str, Any]:
    """Conversations in flight that together need about three times the engine cache."""
    flights = max(2, 3 * options.cache_tokens // 4096)
    words = ["--prompts", "turns", "--turns", "6", "--input-tokens", "600", "--output-tokens", "64"]
    words += ["--concurrency", str(min(flights, 64)), "--requests", str(min(flights, 64) * 6)]
    return in_turns(servers, words, options.rounds)


def in_turns(servers: dict[str, Server], words: Sequence[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: [] for name in servers}
    for number in range(rounds):
        for name in servers if number % 2 == 0 else reversed(servers):
            stage = load(servers[name], [*words, "--seed", str(number + 1)])
            found[name].append(stage)
    plain = statistics.median(row["tokens/s"] for row in found["none"])
    return {
        name: {
            "tokens/s": statistics.median(row["tokens/s"] for row in rows),
            "of none": statistics.median(row["tokens/s"] for row in rows) / plain,
            "rounds": rows,
        }
        for name, rows in found.items()
    }


def load(server: Server, words: Sequence[str]) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [*COMMAND, "bench", "load", "--url", server.stack.url, "--model", MODEL_NAME, "--quiet"]
        vocabulary = f"{VOCABULARY[0]}:{VOCABULARY[1]}"
        command += ["--vocab", vocabulary, "--json", file.name, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"bench load: {done.stderr[-1000:]}")
        stage = json.load(file)["stages"][0]
    return {
        "tokens/s": stage["tokens"]["output_per_second"],
        "ttft p50 ms": stage["ttft_ms"]["p50"],
        "ttft p99 ms": stage["ttft_ms"]["p99"],
        "cached share": (stage["tokens"]["cached"] or 0) / stage["tokens"]["prompt"],
        "failed": stage["requests"]["failed"],
    }


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--lengths", type=numbers, default=[8192, 32768], metavar="N,N")
    parser.add_argument("--cache-tokens", type=int, default=73_728, help="what an engine cache holds")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--host-gb", type=float, default=30)
    parser.add_argument("--disk", metavar="FOLDER:GB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("vllm", nargs="*", metavar="FLAG", help="flags for vLLM, after --")
    options = parser.parse_args(argv)
    options.begun = time.monotonic()
    return options


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
