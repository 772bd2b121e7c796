"""Asks workers to convert between text and tokens."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING, Any, Self

from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime
from dynamo_vllm.serving.tokens.address import ENDPOINT

if TYPE_CHECKING:
    from dynamo.runtime import Client, DistributedRuntime

    from dynamo_vllm.config.options.runtime import ReachOptions
    from dynamo_vllm.serving.plane.runtime import Runtime

ANSWER_SECONDS = 30.0
NAMES_SECONDS = 5.0
ASK_AGAIN_SECONDS = 1.0
"""How long the names of workers are believed before a name that none of them has is looked for again."""

Reply = dict[str, Any]


class TokenWorkers:
    """The workers of a namespace that convert tokens, while the context is open.

    A process that has a runtime gives it; otherwise there is one while the context is open.
    """

    def __init__(self, options: ReachOptions, own: DistributedRuntime | None = None) -> None:
        self._options = options
        self._own = own
        self._drt: Runtime | None = None
        self._client: Client | None = None
        self._names: dict[int, frozenset[str]] = {}
        self._asked = 0.0
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        from dynamo_vllm.serving.plane import runtime

        where = f"{self._options.namespace}.{ENDPOINT}"
        with of_runtime():
            if self._own is None:
                self._drt = runtime.caller(self._options, where)
                endpoint = self._drt.endpoint(where)
            else:
                endpoint = self._own.endpoint(where)
            self._client = await endpoint.client()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drt is not None:
            self._drt.shutdown()

    async def convert(self, operation: str, model: str | None, body: dict[str, Any]) -> Reply:
        """Return {"status", "body"} or {"status", "message", "parameter"}, as in HTTP."""
        found = await self._with(model)
        if model is None and len({self._names[instance] for instance in found}) > 1:
            return _failure(400, "there are several models; name one", "model")
        first = next(self._numbers)
        for number in range(min(2, len(found))):
            reply = await self._ask(found[(first + number) % len(found)], operation, body, ANSWER_SECONDS)
            if reply["status"] not in (502, 503):
                return reply
        if found:
            return reply
        if self._instances():
            return _failure(404, f"the model {model!r} does not exist", "model")
        return _failure(503, "no worker is there that has a tokenizer")

    async def _with(self, model: str | None) -> list[int]:
        """Return the workers of a model."""
        for is_last in (False, True):
            instances = self._instances()
            unknown = [instance for instance in instances if instance not in self._names]
            if is_last and time.monotonic() - self._asked > ASK_AGAIN_SECONDS:
                unknown = instances
            await self._learn(unknown)
            self._names = {i: names for i, names in self._names.items() if i in instances}
            found = [i for i, names in self._names.items() if model is None or model in names]
            if found:
                return found
        return []

    async def _learn(self, instances: list[int]) -> None:
        if not instances:
            return
        self._asked = time.monotonic()
        replies = await asyncio.gather(*(self._ask(i, "models", {}, NAMES_SECONDS) for i in instances))
        for instance, reply in zip(instances, replies, strict=True):
            if reply["status"] == 200:
                self._names[instance] = frozenset(reply["body"]["models"])

    def _instances(self) -> list[int]:
        return [] if self._client is None else sorted(i.instance_id for i in self._client.instances())

    async def _ask(self, instance: int, operation: str, body: dict[str, Any], seconds: float) -> Reply:
        if self._client is None:
            raise RuntimeError("convert() needs an open context")
        request = {"operation": operation, "body": body}
        try:
            async with asyncio.timeout(seconds):
                with of_runtime():
                    stream = await self._client.direct(request, instance, annotated=False)
                    replies = [reply async for reply in stream]
        except TimeoutError:
            return _failure(504, f"the worker did not answer within {seconds:g} s")
        except RuntimeFailed as exc:
            return _failure(502, f"the worker cannot be reached: {exc}")
        if not replies or not isinstance(replies[-1], dict):
            return _failure(502, "the worker ended before it answered")
        reply: Reply = replies[-1]
        return reply


def _failure(status: int, message: str, parameter: str | None = None) -> Reply:
    return {"status": status, "message": message, "parameter": parameter}
