"""Tests the engine with an AsyncLLM that does not compute."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from typing import Any

from dynamo_vllm.engine.base import Counting, EngineParts
from dynamo_vllm.engine.vllm import assembly
from dynamo_vllm.engine.vllm.engine import VllmEngine
from dynamo_vllm.serving.lifecycle import shutdown


class Slow:
    """Blocks its caller at shutdown."""

    output_handler = None

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.ends = 0

    def shutdown(self) -> None:
        assert self.may_end.wait(30)
        self.ends += 1


def engine_of(llm: Any) -> VllmEngine:
    ends = AsyncExitStack()
    unused: Any = None
    ends.push_async_callback(assembly.end, llm)
    return VllmEngine(
        llm=llm,
        facts=unused,
        parts=EngineParts(),
        counting=Counting(),
        steps={},
        operations=unused,
        guides=unused,
        direct=None,
        pooling=None,
        speech=None,
        connector_metrics_url=None,
        ends=ends,
    )


async def test_loop_goes_on_while_vllm_ends_and_it_ends_once() -> None:
    slow = Slow()
    engine = engine_of(slow)
    closing = asyncio.create_task(shutdown.close_engine(engine))
    await asyncio.wait({closing}, timeout=0.05)
    assert not closing.done()
    slow.may_end.set()
    await closing
    await engine.close()
    assert slow.ends == 1
