"""Measures what clients that stop reading do to others: gaps between their tokens, and memory.

    python scripts/stalled.py [--stalled 1 8 64] [--kind plain logprobs n16] [--seconds 30] [-- serve flags …]

Starts one `serve` for each kind and number. In it three rounds follow each other: without further clients,
with as many that read everything (what their work alone costs the others), and with stalled ones. In all of
them some other streams are read and timed. A stalled client reads its first token only.
Without words for `serve` it is the fake engine, with a tiny model's tokenizer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil

from harness import served as serve

OTHERS = 16
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 20},
    "n16": {"n": 16, "temperature": 1.0},
}
START_SECONDS = 300


class Served:
    """A running `serve`."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self._serving = serve.start(folder, *words, "--run-dir", str(folder / "run"), env=os.environ)
        self._serving.wait_ready(START_SECONDS)
        self.port, self.model = self._serving.stack.port, self._serving.models[0]

    def memory(self) -> dict[str, int]:
        """Return the private memory of each process in MB."""
        found: dict[str, int] = {}
        for process in self._serving.below():
            with contextlib.suppress(psutil.Error):
                words = " ".join(process.cmdline())
                name = next((w for w in ("frontend", "EngineCore", "worker") if w in words), "other")
                found[name] = max(found.get(name, 0), process.memory_full_info().uss >> 20)
        return found

    def stop(self) -> float:
        """Stop it; return the seconds that it took."""
        began = time.monotonic()
        self._serving.stop(signal.SIGTERM, 120)
        return time.monotonic() - began


async def ask(served: Served, small: bool = False, **body: Any) -> tuple[Any, Any]:
    """Open a stream and wait for its first byte."""
    made = socket.socket()
    if small:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.setblocking(False)
    await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", served.port))
    reader, writer = await asyncio.open_connection(sock=made, limit=1 << 16)
    given = {"model": served.model, "stream": True, "ignore_eos": True, "temperature": 0, **body}
    path = "chat/completions" if "messages" in given else "completions"
    content = json.dumps(given).encode()
    head = ("host: x", "content-type: application/json", f"content-length: {len(content)}", "", "")
    writer.write(f"POST /v1/{path} HTTP/1.1\r\n".encode() + "\r\n".join(head).encode() + content)
    line = await reader.readline()
    if b" 200 " not in line:
        raise RuntimeError(line + await reader.read(500))
    return reader, writer


async def hold(served: Served, number: int, small: bool, options: argparse.Namespace, kind: str) -> list[Any]:
    """Open streams of this kind, one per client."""
    return [
        await ask(
            served,
            small=small,
            messages=[{"role": "user", "content": f"{i}"}],
            max_tokens=options.tokens,
            **KINDS[kind],
        )
        for i in range(number)
    ]


def read_all(served: Served, number: int, options: argparse.Namespace, kind: str, begun: Any) -> None:
    """Read streams; runs in a separate process, so that it does not delay the measured clients."""

    async def read() -> None:
        held = await hold(served, number, False, options, kind)
        begun.set()
        await asyncio.gather(*(drain(reader) for reader, _ in held))

    async def drain(reader: asyncio.StreamReader) -> None:
        while await reader.read(1 << 16):
            pass

    asyncio.run(read())


async def read_gaps(served: Served, number: int, seconds: float, tokens: int, gaps: list[float]) -> None:
    """Send requests one after the other until the time is over, and collect the gaps between tokens."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        asked = [{"role": "user", "content": f"What is {17 + number} + 25, and why?"}]
        # After its last word a model goes on with tokens that have no text, of which nothing is sent.
        reader, writer = await ask(served, messages=asked, max_tokens=tokens, ignore_eos=False)
        last = None
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.monotonic()
                if last is not None:
                    gaps.append(now - last)
                last = now
                if now > end:
                    break
            if line.startswith(b"data: [DONE]"):
                break
        writer.close()


async def round_of(served: Served, stalled: int, options: argparse.Namespace, kind: str) -> list[float]:
    held = await hold(served, stalled, True, options, kind)
    for reader, _ in held:
        reader._transport.pause_reading()
    gaps = await gaps_of_others(served, options)
    for _, writer in held:
        writer.transport.abort()
    await asyncio.sleep(1)
    return gaps


def round_beside_readers(served: Served, number: int, options: argparse.Namespace, kind: str) -> list[float]:
    begun = multiprocessing.Event()
    readers = multiprocessing.Process(target=read_all, args=(served, number, options, kind, begun))
    readers.start()
    try:
        if not begun.wait(START_SECONDS):
            raise SystemExit("the reading clients got no answer")
        return asyncio.run(gaps_of_others(served, options))
    finally:
        readers.kill()
        readers.join()
        time.sleep(1)


async def gaps_of_others(served: Served, options: argparse.Namespace) -> list[float]:
    gaps: list[float] = []
    await asyncio.gather(
        *(read_gaps(served, i, options.seconds, options.others_tokens, gaps) for i in range(OTHERS))
    )
    options.found_memory = served.memory()
    return gaps


def shown(gaps: list[float]) -> str:
    ordered = sorted(gaps)
    p99 = ordered[int(len(ordered) * 0.99)]
    p50 = statistics.median(ordered)
    return f"{len(gaps):7} gaps, p50 {p50 * 1e3:6.2f} p99 {p99 * 1e3:7.2f} max {ordered[-1] * 1e3:8.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stalled", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=100_000, help="asked for by a stalled client")
    parser.add_argument("--readers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--others-tokens", type=int, default=2000)
    parser.add_argument("--token-ms", type=float, default=5)
    parser.add_argument("words", nargs="*", help="for serve, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        from dynamo_vllm.models.tiny import make_tiny_model

        fake = json.dumps({"vocab_size": 1000, "context_length": 1 << 20, "token_ms": options.token_ms})
        model = str(make_tiny_model(Path(name) / "tiny"))
        words = options.words or [model, "--engine", "fake", "--fake-engine", fake]
        for number, (kind, stalled) in enumerate((k, s) for k in options.kind for s in options.stalled):
            folder = Path(name) / str(number)
            folder.mkdir()
            served = Served(folder, words)
            try:
                for _ in range(options.rounds):
                    without = asyncio.run(round_of(served, 0, options, kind))
                    print(f"{kind:9}  0 stalled: {shown(without)}  MB {options.found_memory}", flush=True)
                    if options.readers:
                        beside = round_beside_readers(served, stalled, options, kind)
                        print(f"{kind:9} {stalled:2} reading: {shown(beside)}", flush=True)
                    having = asyncio.run(round_of(served, stalled, options, kind))
                    print(
                        f"{kind:9} {stalled:2} stalled: {shown(having)}  MB {options.found_memory}",
                        flush=True,
                    )
            finally:
                print(f"{kind:9} stopped in {served.stop():.1f} s", flush=True)


if __name__ == "__main__":
    main()
