"""Finds the workers of a namespace and learns from each which models it has and what they are for."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Self

import msgspec

from dynamo_vllm.serving.calls.card import WorkerCard
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime, when_not_busy
from dynamo_vllm.serving.tokens.address import ENDPOINT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dynamo.runtime import Client, Endpoint

logger = logging.getLogger(__name__)
NAMES_SECONDS = 5.0
ASK_AGAIN_SECONDS = 1.0
"""How long the names of workers are believed before a name that none of them has is looked for again."""

Reply = dict[str, Any]


class Directory:
    """The workers of a namespace, while the context is open."""

    def __init__(self, namespace: str, endpoint: Callable[[str], Endpoint]) -> None:
        """`endpoint` returns the runtime's object for an address."""
        self._address = f"{namespace}.{ENDPOINT}"
        self._endpoint = endpoint
        self._client: Client | None = None
        self._clients: dict[str, asyncio.Task[Client]] = {}
        self._cards: dict[int, WorkerCard] = {}
        self._asked = 0.0

    async def __aenter__(self) -> Self:
        self._client = await when_not_busy(self._endpoint(self._address).client)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._client = None
        for making in self._clients.values():
            making.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether no worker is there."""
        return not self._instances()

    async def having(self, model: str | None) -> list[WorkerCard]:
        """Return the workers of a model, of all models for None."""
        for is_last in (False, True):
            await self._follow(everybody=is_last and self._is_old)
            found = [card for card in self._cards.values() if model is None or model in card.models]
            if found:
                return found
        return []

    async def every(self, names: Iterable[str] = ()) -> list[WorkerCard]:
        """Return all workers; all are asked again if nobody has one of these names."""
        await self._follow()
        known = {name for card in self._cards.values() for name in card.models}
        if not known.issuperset(names) and self._is_old:
            await self._follow(everybody=True)
        return list(self._cards.values())

    async def ask(self, instance: int, operation: str, body: dict[str, Any], seconds: float) -> Reply:
        """Return {"status", "body"} or {"status", "message", "parameter"}, as in HTTP."""
        if self._client is None:
            raise RuntimeError("ask() needs an open context")
        request = {"operation": operation, "body": body}
        try:
            async with asyncio.timeout(seconds):
                with of_runtime():
                    stream = await self._client.direct(request, instance, annotated=False)
                    replies = [reply async for reply in stream]
        except TimeoutError:
            return failure(504, f"the worker did not answer within {seconds:g} s")
        except RuntimeFailed as exc:
            return failure(502, f"the worker cannot be reached: {exc}")
        if not replies or not isinstance(replies[-1], dict):
            return failure(502, "the worker ended before it answered")
        reply: Reply = replies[-1]
        return reply

    async def client(self, address: str) -> Client:
        """Return a client for an address of workers; it stays open."""
        if address not in self._clients:
            self._clients[address] = asyncio.ensure_future(self._connected(address))
        try:
            return await asyncio.shield(self._clients[address])
        except RuntimeFailed:
            self._clients.pop(address, None)
            raise

    async def _connected(self, address: str) -> Client:
        made = await when_not_busy(self._endpoint(address).client)
        with of_runtime():
            async with asyncio.timeout(NAMES_SECONDS):
                await made.wait_for_instances()  # it begins with none
            return made

    @property
    def _is_old(self) -> bool:
        return time.monotonic() - self._asked > ASK_AGAIN_SECONDS

    async def _follow(self, *, everybody: bool = False) -> None:
        """Learn of workers that came, forget those that left."""
        instances = self._instances()
        await self._learn(instances if everybody else [i for i in instances if i not in self._cards])
        self._cards = {instance: card for instance, card in self._cards.items() if instance in instances}

    async def _learn(self, instances: list[int]) -> None:
        if not instances:
            return
        self._asked = time.monotonic()
        replies = await asyncio.gather(*(self.ask(i, "models", {}, NAMES_SECONDS) for i in instances))
        for instance, reply in zip(instances, replies, strict=True):
            if reply["status"] != 200:
                continue
            try:
                card = msgspec.convert(reply["body"], WorkerCard)
            except msgspec.ValidationError as exc:
                logger.warning("worker %x says something odd of itself: %s", instance, exc)
            else:
                self._cards[instance] = msgspec.structs.replace(card, instance=instance)

    def _instances(self) -> list[int]:
        return [] if self._client is None else sorted(i.instance_id for i in self._client.instances())


def failure(status: int, message: str, parameter: str | None = None) -> Reply:
    return {"status": status, "message": message, "parameter": parameter}
