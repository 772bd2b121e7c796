"""Measures bare AsyncLLM in one process, without HTTP: the speed of the engine without a server.

    PYTHONPATH=scripts python -m peers.bare --concurrency 1,8 --requests 32 --model FOLDER [vLLM flags]

prints a report of the same shape as `bench load --json`. Its client is inside: the CPU of the process `bare`
is that of the engine's front part and of the tasks that read its streams. With --serve it reads one line of
JSON for each stage or question and answers with one, so that it can take turns with servers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO

import msgspec
import psutil
import uvloop

from dynamo_vllm.bench.load.prompts import Conversation, PromptSpec
from dynamo_vllm.bench.report.figures import spread
from peers.settings import MODEL_NAME, VOCABULARY, Stage

LABEL = "bare"


@dataclass
class Stream:
    """The start of one answer, and the times of its outputs."""

    sent: float
    times: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""


class Bare:
    def __init__(self, flags: Sequence[str]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
        from vllm.v1.engine.async_llm import AsyncLLM

        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(prog="bare"))
        self._engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs.from_cli_args(parser.parse_args(list(flags)))
        )
        self._count = 0

    async def stream(self, prompt: list[int], max_tokens: int) -> Stream:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        self._count += 1
        seen = Stream(time.perf_counter())
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, str(self._count)):
            seen.times.append(time.perf_counter())
            seen.tokens += len(output.outputs[0].token_ids)
            seen.text += output.outputs[0].text
        return seen

    async def measure(self, stage: Stage, seed: int) -> dict[str, Any]:
        prompts = [self._prompt(stage, seed, number) for number in range(stage.requests)]
        warm = [self._prompt(stage, seed, -1 - number) for number in range(stage.warmup)]
        await asyncio.gather(*(self.stream(prompt, stage.output_tokens) for prompt in warm))
        waiting = iter(prompts)
        streams: list[Stream] = []

        async def one_after_another() -> None:
            for prompt in waiting:
                streams.append(await self.stream(prompt, stage.output_tokens))  # noqa: PERF401

        own, tree, began = time.process_time(), tree_cpu_seconds(), time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(stage.concurrency)))
        seconds = time.perf_counter() - began
        return report(stage, streams, seconds, time.process_time() - own, tree_cpu_seconds() - tree)

    def _prompt(self, stage: Stage, seed: int, number: int) -> list[int]:
        """Return the same prompt that `bench load` sends."""
        spec = PromptSpec(
            kind="random",
            api="completions",
            model=MODEL_NAME,
            input_tokens=stage.input_tokens,
            output_tokens=stage.output_tokens,
            vocab=VOCABULARY,
            seed=seed,
            stage="0",  # the first of its run
        )
        return list(msgspec.json.decode(Conversation(spec, number).next_body(()))["prompt"])

    def close(self) -> None:
        self._engine.shutdown()


def report(
    stage: Stage, streams: Sequence[Stream], seconds: float, own: float, tree: float
) -> dict[str, Any]:
    """Return a stage in the form of `bench load`, as far as it applies without HTTP."""
    tokens = sum(stream.tokens for stream in streams)
    spreads = {
        "ttft_ms": [s.times[0] - s.sent for s in streams],
        "itl_ms": [b - a for s in streams for a, b in zip(s.times, s.times[1:], strict=False)],
        "tpot_ms": [(s.times[-1] - s.times[0]) / (s.tokens - 1) for s in streams if s.tokens > 1],
        "e2e_ms": [s.times[-1] - s.sent for s in streams],
    }
    process = {
        "cpu_seconds": own,
        "cpu_us_per_token": 1e6 * own / tokens,
        "tree_cpu_seconds": tree,
        "tree_cpu_us_per_token": 1e6 * tree / tokens,
        "rss_mb": psutil.Process().memory_info().rss / 2**20,
    }
    return {
        "name": stage.name,
        "seconds": seconds,
        "requests": {"ok": len(streams), "failed": 0, "per_second": len(streams) / seconds},
        "tokens": {
            "prompt": len(streams) * stage.input_tokens,
            "output": tokens,
            "output_per_second": tokens / seconds,
        },
        **{name: msgspec.to_builtins(spread(values)) for name, values in spreads.items()},
        "goodput": None,
        "processes": {LABEL: process},
        "client": None,
        "errors": {},
    }


def tree_cpu_seconds() -> float:
    me = psutil.Process()
    return sum(sum(p.cpu_times()[:2]) for p in [me, *me.children(recursive=True)])


async def serve(bare: Bare, out: TextIO) -> None:
    """Answer lines from standard input until it ends."""
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        if "stage" in asked:
            answer: Any = await bare.measure(Stage(**asked["stage"]), asked["seed"])
        else:
            answer = [(await bare.stream(prompt, asked["max_tokens"])).text for prompt in asked["prompts"]]
        print(json.dumps(answer), file=out, flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--concurrency", default="1,8", help="a stage for each number")
    parser.add_argument("--requests", type=int, default=32, help="requests of a stage")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve", action="store_true", help="read stages from standard input")
    options, flags = parser.parse_known_args()
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to standard output
    bare = Bare(flags)
    try:
        if options.serve:
            await serve(bare, out)
            return
        stages = []
        for number in map(int, options.concurrency.split(",")):
            stage = Stage(number, options.requests, options.input_tokens, options.output_tokens)
            stages.append(await bare.measure(stage, options.seed))
        settings = {"flags": flags, "seed": options.seed}
        print(
            json.dumps({"version": 1, "url": None, "settings": settings, "stages": stages}, indent=1),
            file=out,
        )
    finally:
        bare.close()


def order(stage: Stage, seed: int) -> dict[str, Any]:
    """Return the line that --serve reads for a stage."""
    return {"stage": dataclasses.asdict(stage), "seed": seed}


if __name__ == "__main__":
    uvloop.run(main())
