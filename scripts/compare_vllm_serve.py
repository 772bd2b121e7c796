"""Ours beside `vllm serve` in one run: time to first token at concurrency 1, CPU per token at 8.

    .venv/bin/python scripts/compare_vllm_serve.py [--model FOLDER] [--rounds 6]

Both servers run the same model with the same flags; rounds alternate, so that a noisy machine hits both. CPU
is that of one process each: our worker's main process and vLLM's API process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from dynamo_vllm.models.tiny import make_tiny_model

FLAGS = ("--max-model-len", "2048", "--enforce-eager", "--dtype", "float32", "--block-size", "32")
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64


@dataclass
class Server:
    name: str
    url: str
    process: psutil.Process
    first_token_ms: list[float] = field(default_factory=list)
    cpu_us_per_token: list[float] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "DYN_FILE_KV": str(folder / "discovery"),
        "DYN_VLLM_BIND_HOST": "127.0.0.1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextlib.contextmanager
def running(command: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment(folder), stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        process.kill()
        process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], what: str) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise SystemExit(f"{what} did not become ready")


@contextlib.contextmanager
def ours(model: Path, folder: Path) -> Iterator[Server]:
    port, cli = free_port(), [sys.executable, "-m", "dynamo_vllm.cli.main"]
    worker = [*cli, "worker", "--model", str(model), "--served-model-name", "tiny", *FLAGS]
    with (
        running([*cli, "frontend", "--port", str(port)], folder, "frontend"),
        running(worker, folder, "worker") as process,
    ):
        wait_for(f"http://127.0.0.1:{port}/health", process, "our worker")
        yield Server("dynamo-vllm", f"http://127.0.0.1:{port}", psutil.Process(process.pid))


@contextlib.contextmanager
def vllm_serve(model: Path, folder: Path) -> Iterator[Server]:
    port = free_port()
    # What `vllm serve` runs; the command itself wants the package metadata of the CUDA build.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1", *FLAGS]
    with running(command, folder, "vllm-serve") as process:
        wait_for(f"http://127.0.0.1:{port}/health", process, "vllm serve")
        yield Server("vllm serve", f"http://127.0.0.1:{port}", psutil.Process(process.pid))


def body(chance: random.Random) -> dict[str, object]:
    return {
        "model": "tiny",
        "prompt": [chance.randrange(10, 900) for _ in range(PROMPT_TOKENS)],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


async def one(client: httpx.AsyncClient, server: Server, chance: random.Random) -> float:
    """Seconds to the first token of one streamed request, read to its end."""
    began, first = time.perf_counter(), 0.0
    async with client.stream("POST", f"{server.url}/v1/completions", json=body(chance)) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not first and line.startswith("data: {"):
                first = time.perf_counter() - began
    return first


async def measure(server: Server, chance: random.Random, alone: int, together: int) -> None:
    async with httpx.AsyncClient(timeout=120) as client:
        await one(client, server, chance)  # opens the connection that the others use again
        server.first_token_ms += [1000 * await one(client, server, chance) for _ in range(alone)]
        before, began = server.cpu_seconds(), time.perf_counter()

        async def worker() -> None:
            for _ in range(together):
                await one(client, server, chance)

        await asyncio.gather(*(worker() for _ in range(8)))
        tokens = 8 * together * OUTPUT_TOKENS
        server.cpu_us_per_token.append(1e6 * (server.cpu_seconds() - before) / tokens)
        server.tokens_per_second.append(tokens / (time.perf_counter() - began))


def report(servers: list[Server]) -> None:
    print(f"{'':<14}{'TTFT p50, c=1':>16}{'CPU per token, c=8':>22}{'tokens/s, c=8':>16}")
    for s in servers:
        first = statistics.median(s.first_token_ms)
        cpu = statistics.median(s.cpu_us_per_token)
        spread = f"{cpu:.0f} µs ({min(s.cpu_us_per_token):.0f}–{max(s.cpu_us_per_token):.0f})"
        print(f"{s.name:<14}{first:>13.1f} ms{spread:>22}{statistics.median(s.tokens_per_second):>16.0f}")
    a, b = servers
    first = statistics.median(a.first_token_ms) / statistics.median(b.first_token_ms)
    cpu = statistics.median(a.cpu_us_per_token) / statistics.median(b.cpu_us_per_token)
    print(f"{a.name} / {b.name}: TTFT {first:.2f}, CPU per token {cpu:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder of a model (default: the tiny one)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--alone", type=int, default=12, help="requests per round at concurrency 1")
    parser.add_argument(
        "--together", type=int, default=3, help="requests per round and client at concurrency 8"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = options.model or make_tiny_model(folder / "tiny")
        print("starting both servers, one after the other …", flush=True)
        with ours(model, folder) as a, vllm_serve(model, folder) as b:
            chance = random.Random(1)
            asyncio.run(measure(a, chance, 2, 1))
            asyncio.run(measure(b, chance, 2, 1))
            for server in (a, b):
                server.first_token_ms.clear()
                server.cpu_us_per_token.clear()
                server.tokens_per_second.clear()
            for number in range(options.rounds):
                for server in (a, b) if number % 2 == 0 else (b, a):
                    asyncio.run(measure(server, chance, options.alone, options.together))
                print(f"round {number + 1} of {options.rounds}", flush=True)
            report([a, b])


if __name__ == "__main__":
    main()
