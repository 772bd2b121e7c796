"""The whole product on a GPU: serve, answer, prove the cache, lose an engine, stop; exits 1 when one fails.

python scripts/gpu/smoke.py [--model FOLDER] [vLLM flags …]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

CLI = [sys.executable, "-m", "dynamo_vllm.cli.main"]
ROWS: list[tuple[str, bool, str]] = []


def step(name: str, act: Callable[[], str]) -> None:
    """One row of the table; a failure does not end the others."""
    began = time.monotonic()
    try:
        said, fine = act(), True
    except Exception as exc:
        said, fine = f"{type(exc).__name__}: {exc}", False
    ROWS.append((name, fine, f"{said} ({time.monotonic() - began:.1f} s)"))
    print(f"{'ok    ' if fine else 'FAILED'} {name}: {ROWS[-1][2]}", flush=True)


class Served:
    def __init__(self, folder: Path, model: str | None, flags: list[str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}"
        words = [model] if model else []
        port = self.url.rsplit(":", 1)[1]
        self.out = folder / "serve.out"
        command = [*CLI, "serve", *words, "--port", port, "--run-dir", str(folder / "run"), *flags]
        with self.out.open("wb") as out:
            env = os.environ | {"XDG_CACHE_HOME": str(folder)}
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)
        self.name = "tiny"

    def wait(self) -> str:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"^ready: .* model=(\S+) workers=\d+$", self.out.read_text(), re.M):
                self.name = found[1]
                return found[0]
            time.sleep(0.2)
        raise RuntimeError(self.out.read_text()[-3000:])

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def text(self, first: int, tokens: int = 128) -> str:
        prompt = [first, *range(20, 60)]
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        return str(self.ask("/v1/completions", body)["choices"][0]["text"])


def engine_core(serve: psutil.Process) -> psutil.Process:
    (core,) = [
        p for p in serve.children(recursive=True) if "EngineCore" in " ".join([p.name(), *p.cmdline()])
    ]
    return core


def gpu_memory() -> int:
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    )
    return sum(int(line) for line in listed.stdout.split())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or hub id (default: the tiny demo model)")
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        before = gpu_memory()
        served = Served(Path(name), options.model, flags)
        try:
            step("serve", served.wait)
            if ROWS[-1][1]:
                use(served, before)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in psutil.Process(served.process.pid).children(recursive=True):
                    process.kill()
            served.process.kill()
    failed = [name for name, fine, _ in ROWS if not fine]
    print(f"{len(ROWS) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def use(served: Served, memory_before: int) -> None:  # noqa: C901
    def concurrent() -> str:
        with ThreadPoolExecutor(64) as pool:
            began = time.monotonic()
            first = list(pool.map(served.text, range(100, 164)))
            rate = 64 * 128 / (time.monotonic() - began)
            again = list(pool.map(served.text, range(100, 164)))
        same = sum(a == b for a, b in zip(first, again, strict=True))
        if same < 60:
            raise RuntimeError(f"only {same} of 64 greedy answers were the same twice")
        return f"64 x 128 tokens, {rate:.0f} tokens/s through HTTP, {same} of 64 the same twice"

    def proof() -> str:
        done = subprocess.run(
            [*CLI, "check", "--live", served.url, "--strict"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return "a KV event reached the router, a repeated prompt came from the cache"

    def bad_input() -> str:
        try:
            served.ask("/v1/completions", {"model": served.name, "prompt": [20] * 100_000, "max_tokens": 1})
        except urllib.error.HTTPError as exc:
            return f"{exc.code}: {json.load(exc)['message']}"
        raise RuntimeError("a prompt longer than the context was answered")

    def lost_engine() -> str:
        serve = psutil.Process(served.process.pid)
        engine_core(serve).kill()
        began = time.monotonic()
        while served.ask("/v1/models")["data"]:
            time.sleep(0.05)
        gone = time.monotonic() - began
        while True:
            with contextlib.suppress(urllib.error.URLError):
                if served.ask("/health")["status"] == "ready":
                    break
            if time.monotonic() - began > 240:
                raise RuntimeError(served.out.read_text()[-3000:])
            time.sleep(0.2)
        served.text(100, 4)
        return f"out of service after {gone:.1f} s, answering again after {time.monotonic() - began:.0f} s"

    def stop() -> str:
        children = psutil.Process(served.process.pid).children(recursive=True)
        served.process.send_signal(signal.SIGINT)
        code = served.process.wait(60)
        left = [p.pid for p in children if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if code or left:
            raise RuntimeError(f"exit code {code}, still running {left}")
        return f"exit code 0, nothing left, GPU memory {gpu_memory() - memory_before:+d} MiB"

    step("64 requests at once", concurrent)
    step("check --live", proof)
    step("prompt too long", bad_input)
    step("killed engine core", lost_engine)
    step("stop", stop)


if __name__ == "__main__":
    sys.exit(main())
