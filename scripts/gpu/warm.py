"""How much longer the first request of each kind takes than the second, and what is compiled after "ready".

    python scripts/gpu/warm.py [--rounds 1] [--model FOLDER | --demo NAME] [--only KIND …] [-- serve flags …]

Each round is a fresh `serve` with empty caches; without a model it is a tiny one, eager and with CUDA graphs.
It then gets three requests of each kind, no two with the same prompt, grammar or picture, so that only what
is built once makes the first one longer. The kinds come in another order in each round. vLLM's JIT monitor
names every kernel that is compiled while it serves; after the ready line it must say nothing.
Exits 1 when it did, or when a request failed.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import http.client
import io
import json
import os
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from harness import served as serve

READY_SECONDS = 400
TIMES = 3
"""Requests of each kind."""
COMPILED = re.compile(r"during inference: .*latency spike|Triton autotuning for function")
"""What vLLM's JIT monitor and Triton write."""
TOKENS = 8
WORDS = ("one", "two", "three", "red", "green", "blue", "sun", "moon", "rain")
Body = dict[str, Any]
Batch = list[tuple[str, Body]]
"""Requests sent together: path and body of each."""


# --- the kinds of requests --------------------------------------------------------------------------------


def words(number: int, count: int = 12) -> str:
    """Other words for each number."""
    chance = random.Random(number)
    return " ".join(chance.choice(WORDS) for _ in range(count))


def chat(number: int, **more: Any) -> Batch:
    body = {"messages": [{"role": "user", "content": f"{number} {words(number)}"}], **more}
    return [("/v1/chat/completions", body)]


def tokens(number: int, count: int = 24, **more: Any) -> Batch:
    chance = random.Random(number)
    prompt = [chance.randrange(20, 200) for _ in range(count)]
    return [("/v1/completions", {"prompt": prompt, **more})]


def schema(number: int) -> Body:
    held = {f"key_{number}": {"type": "integer"}, f"name_{number}": {"type": "string"}}
    return {"type": "object", "properties": held, "required": list(held)}


def tool(number: int) -> Body:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": schema(number)}}


def picture(number: int) -> str:
    from PIL import Image

    made = io.BytesIO()
    Image.new("RGB", (96, 96), (number * 37 % 256, number * 91 % 256, 120)).save(made, "PNG")
    return "data:image/png;base64," + base64.b64encode(made.getvalue()).decode()


def seen(number: int) -> Batch:
    parts = [
        {"type": "text", "text": words(number)},
        {"type": "image_url", "image_url": {"url": picture(number)}},
    ]
    return chat(number, messages=[{"role": "user", "content": parts}])


def format_of(number: int) -> Body:
    return {"type": "json_schema", "json_schema": {"name": "made", "schema": schema(number)}}


KINDS: dict[str, Callable[[int], Batch]] = {
    "greedy": lambda i: tokens(i, temperature=0),
    "chat": lambda i: chat(i, temperature=0),
    "chat stream": lambda i: chat(i, temperature=0, stream=True),
    "chat sampled": lambda i: chat(i, temperature=0.8),
    "top-k top-p": lambda i: tokens(i, temperature=0.8, top_k=5, top_p=0.9),
    "min-p": lambda i: tokens(i, temperature=0.8, min_p=0.05),
    "seed": lambda i: tokens(i, temperature=0.8, seed=i),
    "penalties": lambda i: tokens(
        i, temperature=0.8, presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1
    ),
    "logit bias": lambda i: tokens(i, temperature=0.8, logit_bias={"30": 2.0}),
    "min tokens": lambda i: tokens(i, temperature=0.8, min_tokens=4, ignore_eos=False),
    "logprobs": lambda i: tokens(i, temperature=0, logprobs=3),
    "chat logprobs": lambda i: chat(i, temperature=0, logprobs=True, top_logprobs=3),
    "prompt logprobs": lambda i: chat(i, temperature=0, prompt_logprobs=2),
    "n=2": lambda i: tokens(i, temperature=0.8, n=2),
    "stop": lambda i: chat(i, temperature=0, stop=["never said"]),
    "json schema": lambda i: chat(i, temperature=0, response_format=format_of(i)),
    "json object": lambda i: chat(i, temperature=0, response_format={"type": "json_object"}),
    "regex": lambda i: chat(i, temperature=0, guided_regex=f"[a-d]{{{20 + i % 7}}}"),
    "choice": lambda i: chat(i, temperature=0, guided_choice=[f"no {i} " * 9, f"yes {i} " * 9]),
    "grammar": lambda i: chat(i, temperature=0, guided_grammar=f'root ::= "{i}" [a-d]+ "."'),
    "tools": lambda i: chat(i, temperature=0, tools=[tool(i)]),
    "tool required": lambda i: chat(i, temperature=0, tools=[tool(i)], tool_choice="required"),
    "two at once": lambda i: [one for k in range(2) for one in tokens(i + 1000 * k, temperature=0)],
    "eight at once": lambda i: [one for k in range(8) for one in tokens(i + 1000 * k, temperature=0.8)],
    "long": lambda i: tokens(i, 500, temperature=0),
    "longer": lambda i: tokens(i, 1500, temperature=0),
}
MORE: dict[str, Callable[[int], Batch]] = {
    "picture": seen,
    "long chunked": lambda i: tokens(i, 3800, temperature=0),
    "long twice": lambda i: tokens(i, 1500, temperature=0) + tokens(i + 1000, 1500, temperature=0),
}


# --- one server -------------------------------------------------------------------------------------------


class Server:
    """One `serve` with caches of its own."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.logs = folder / "run" / "logs"
        caches = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        cold = {name: str(folder / name.lower()) for name in caches}
        words = [*flags, "--run-dir", str(folder / "run")]
        self.serving = serve.start(folder, *words, env=os.environ | cold)

    def written(self) -> dict[Path, int]:
        """Bytes in each worker's log."""
        return {path: path.stat().st_size for path in self._worker_logs()}

    def compiled_since(self, written: dict[Path, int]) -> list[str]:
        new = [
            path.read_bytes()[written.get(path, 0) :].decode(errors="replace") for path in self._worker_logs()
        ]
        return [line.strip() for text in new for line in text.splitlines() if COMPILED.search(line)]

    def _worker_logs(self) -> list[Path]:
        return sorted(self.logs.glob("worker*.log"))

    def seconds(self, batch: Batch, model: str) -> float:
        """Until the last byte of the last answer."""
        with ThreadPoolExecutor(len(batch)) as pool:
            began = time.perf_counter()
            done = [pool.submit(self._ask, path, body, model) for path, body in batch]
            for one in done:
                one.result()
            return time.perf_counter() - began

    def _ask(self, path: str, body: Body, model: str) -> None:
        given = {"model": model, "max_tokens": TOKENS, "ignore_eos": True, **body}
        connection = http.client.HTTPConnection("127.0.0.1", self.serving.stack.port, timeout=300)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(given), {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200 or '"error"' in text[-400:]:
            raise RuntimeError(f"{answer.status} {text[:300]}")


@contextlib.contextmanager
def served(flags: list[str], kept: Path | None) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as name:
        server = Server(Path(name), flags)
        try:
            yield server
        finally:
            server.serving.stop(seconds=90)
            if kept is not None:
                shutil.copytree(server.logs, kept, dirs_exist_ok=True)


# --- rounds -----------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Of all rounds of one setting."""

    seconds: dict[str, list[list[float]]]
    compiled: list[str]
    failed: dict[str, str]
    starts: list[float]


def measure(flags: list[str], options: argparse.Namespace) -> Found:
    found, only = Found({}, [], {}, []), options.only
    kinds = {**KINDS, **{name: kind for name, kind in MORE.items() if name in only}}
    if only:
        kinds = {name: kind for name, kind in kinds.items() if name in only}
    for number in range(options.rounds):
        began = time.monotonic()
        with served(flags, options.logs) as server:
            server.serving.wait_ready(READY_SECONDS)
            found.starts.append(time.monotonic() - began)
            written = server.written()
            order = [*kinds, *(f"adapter {name}" for name in options.adapter)]
            random.Random(number).shuffle(order)
            for place, name in enumerate(order):
                ask(server, name, kinds.get(name, KINDS["chat"]), 10 * place + 1, found)
            found.compiled += server.compiled_since(written)
    return found


def ask(server: Server, name: str, kind: Callable[[int], Batch], number: int, found: Found) -> None:
    model = name.removeprefix("adapter ") if name.startswith("adapter ") else server.serving.models[0]
    try:
        times = [server.seconds(kind(number + i), model) for i in range(TIMES)]
    except Exception as exc:
        found.failed[name] = f"{type(exc).__name__}: {exc}"
        return
    found.seconds.setdefault(name, []).append(times)


def report(title: str, found: Found) -> bool:
    """Whether all is as it should be; the ratio is the median of the rounds."""
    starts = ", ".join(f"{s:.1f}" for s in found.starts)
    print(f"\n{title}: ready after {starts} s")
    print(f"{'kind':18} {'first':>8} {'second':>8} {'third':>8}  ms   1st/2nd")
    for name, rounds in sorted(found.seconds.items()):
        first, second, third = (statistics.median(times[i] for times in rounds) for i in range(TIMES))
        ratio = statistics.median(times[0] / times[1] for times in rounds)
        print(f"{name:18} {first * 1e3:8.1f} {second * 1e3:8.1f} {third * 1e3:8.1f}       {ratio:6.2f}")
    for name, why in found.failed.items():
        print(f"FAILED {name}: {why}")
    for line in found.compiled:
        print(f"COMPILED after ready: {line}")
    print(f"compiled after ready: {len(found.compiled)}", flush=True)
    return not found.failed and not found.compiled


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1, help="fresh starts of each setting")
    parser.add_argument("--model", help="folder or hub id")
    parser.add_argument("--demo", help="a model of the package: chat, lora, vision")
    parser.add_argument("--only", action="append", default=[], choices=[*KINDS, *MORE], metavar="KIND")
    parser.add_argument("--adapter", action="append", default=[], help="ask this adapter too", metavar="NAME")
    parser.add_argument("--logs", type=Path, help="keep the logs of the last round here", metavar="FOLDER")
    parser.add_argument("flags", nargs="*", help="of serve, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        told = ["--jit-monitor-verbose", *options.flags]  # or it names each kernel once
        if options.demo:
            settings = {f"demo {options.demo}": ["--demo", options.demo, *told]}
        elif options.model:
            settings = {options.model: [options.model, *told]}
        else:
            from dynamo_vllm.models.tiny import make_tiny_model

            model = [str(make_tiny_model(Path(name) / "tiny")), *told]
            settings = {"tiny, eager": [*model, "--enforce-eager"], "tiny, CUDA graphs": model}
        fine = [report(title, measure(flags, options)) for title, flags in settings.items()]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
