"""The whole product on a GPU: serve, answer, prove the cache, lose an engine, stop; exits 1 when one fails.

python scripts/gpu/smoke.py [--model FOLDER] [vLLM flags …]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from harness import processes, served
from harness.processes import COMMAND
from harness.served import Serving

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


def ask(serving: Serving, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(serving.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def text(serving: Serving, first: int, tokens: int = 128) -> str:
    body = {
        "model": serving.models[0],
        "prompt": [first, *range(20, 60)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return str(ask(serving, "/v1/completions", body)["choices"][0]["text"])


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
        words = [*filter(None, [options.model]), "--run-dir", str(Path(name, "run")), *flags]
        serving = served.start(Path(name), *words, env=os.environ | {"XDG_CACHE_HOME": name})
        try:
            step("serve", serving.wait_ready)
            if ROWS[-1][1]:
                use(serving, before)
        finally:
            serving.process.kill()
    failed = [name for name, fine, _ in ROWS if not fine]
    print(f"{len(ROWS) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def use(serving: Serving, memory_before: int) -> None:
    def concurrent() -> str:
        with ThreadPoolExecutor(64) as pool:
            began = time.monotonic()
            first = list(pool.map(partial(text, serving), range(100, 164)))
            rate = 64 * 128 / (time.monotonic() - began)
            again = list(pool.map(partial(text, serving), range(100, 164)))
        same = sum(a == b for a, b in zip(first, again, strict=True))
        if same < 60:
            raise RuntimeError(f"only {same} of 64 greedy answers were the same twice")
        return f"64 x 128 tokens, {rate:.0f} tokens/s through HTTP, {same} of 64 the same twice"

    def proof() -> str:
        done = subprocess.run(
            [*COMMAND, "check", "--live", serving.url, "--strict"], capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        return "a KV event reached the router, a repeated prompt came from the cache"

    def bad_input() -> str:
        try:
            body = {"model": serving.models[0], "prompt": [20] * 100_000, "max_tokens": 1}
            ask(serving, "/v1/completions", body)
        except urllib.error.HTTPError as exc:
            return f"{exc.code}: {json.load(exc)['message']}"
        raise RuntimeError("a prompt longer than the context was answered")

    def is_ready() -> bool:
        with contextlib.suppress(urllib.error.URLError):
            return bool(ask(serving, "/health")["status"] == "ready")
        return False

    def lost_engine() -> str:
        serving.engine_core().kill()
        began = time.monotonic()
        processes.wait_until("its end", [serving.process], lambda: not ask(serving, "/v1/models")["data"])
        gone = time.monotonic() - began
        processes.wait_until("another engine", [serving.process], is_ready, 240, every=0.2)
        text(serving, 100, 4)
        return f"out of service after {gone:.1f} s, answering again after {time.monotonic() - began:.0f} s"

    def stop() -> str:
        complaints = serving.stop()
        code = serving.process.poll()
        if code or complaints:
            raise RuntimeError(f"exit code {code}; {'; '.join(complaints)}")
        return f"exit code 0, nothing left, GPU memory {gpu_memory() - memory_before:+d} MiB"

    step("64 requests at once", concurrent)
    step("check --live", proof)
    step("prompt too long", bad_input)
    step("killed engine core", lost_engine)
    step("stop", stop)


if __name__ == "__main__":
    sys.exit(main())
