"""Compares the settings of prefill and decode workers of a model before a worker registers.

Each such worker serves one small endpoint, whatever its component. A new worker calls the running ones; both
sides log what differs, and the new one is refused, because every prompt would be computed twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from typing import TYPE_CHECKING

import msgspec

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.kv.compatibility import differences
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime, when_not_busy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from dynamo.runtime import Client

    from dynamo_vllm.job import Terms
    from dynamo_vllm.serving.plane.runtime import Runtime

logger = logging.getLogger(__name__)
ENDPOINT = "kv_terms.compare"
SEEN_SECONDS = 30.0
ANSWER_SECONDS = 15.0
"""A worker that has not answered by then is not a peer; longer than a machine may pause.

A process that has ended refuses at once; only a hung one makes us wait.
"""


def endpoint_of(address: str) -> str:
    """The endpoint of all workers in the namespace of `address`, a worker's own."""
    return f"{address.split('.')[0]}.{ENDPOINT}"


class Card(msgspec.Struct, frozen=True):
    """What one worker tells another."""

    instance: int
    name: str
    """Role, machine and process, for logs."""
    served: str
    since: float
    """When it asked to join; the later of two that do not match is refused."""
    terms: dict[str, str | int]
    is_registered: bool = False

    def came_before(self, other: Card) -> bool:
        if self.is_registered != other.is_registered:
            return self.is_registered
        return (self.since, self.instance) < (other.since, other.instance)


class Peers:
    """This worker's settings, and the comparison with all others."""

    def __init__(self, drt: Runtime, address: str, served: str, role: str, terms: Terms) -> None:
        self._drt, self._address = drt, endpoint_of(address)
        self._endpoint = drt.endpoint(self._address)
        self._card = Card(
            instance=self._endpoint.connection_id(),
            name=f"{role} worker, process {os.getpid()} on {socket.gethostname()}",
            served=served,
            since=time.time(),
            terms=dict(terms),
        )

    async def join(self) -> None:
        """Answer others from now on, and match the running ones; ConfigError says what differs."""
        self._drt.serve(
            self._address, self._answer, "new workers cannot compare their settings with this one's"
        )
        client = await when_not_busy(self._endpoint.client)
        await self._wait_until_visible(client)
        others = [instance for instance in client.instance_ids() if instance != self._card.instance]
        for other in await asyncio.gather(*(self._ask(client, instance) for instance in others)):
            self._refuse_if_different(other)
        self._card = msgspec.structs.replace(self._card, is_registered=True)

    async def _wait_until_visible(self, client: Client) -> None:
        """Of two that start together at least one must see the other, so each is visible before it looks."""
        try:
            async with asyncio.timeout(SEEN_SECONDS):
                # The runtime has no event for it.
                while self._card.instance not in await client.wait_for_instances():  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            logger.warning("discovery does not show this worker's KV settings after %.0f s", SEEN_SECONDS)

    async def _ask(self, client: Client, instance: int) -> Card | None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                with of_runtime():
                    stream = await client.direct(msgspec.to_builtins(self._card), instance, annotated=False)
                    card = msgspec.convert([card async for card in stream][-1], Card)
        except (RuntimeFailed, TimeoutError) as exc:  # not a peer if it does not answer
            logger.info("worker %x did not send its KV settings: %s", instance, exc or type(exc).__name__)
            return None
        return card

    async def _answer(self, request: object, context: object) -> AsyncIterator[object]:
        """A new worker calls; log what differs here too."""
        other = msgspec.convert(request, Card)
        if other.served == self._card.served and (found := differences(self._card.terms, other.terms)):
            logger.error("the settings of a %s do not match this worker: %s", other.name, "; ".join(found))
        yield msgspec.to_builtins(self._card)

    def _refuse_if_different(self, other: Card | None) -> None:
        if other is None or other.served != self._card.served or not other.came_before(self._card):
            return
        if found := differences(self._card.terms, other.terms):
            raise ConfigError(
                f"this worker cannot share KV caches with the {other.name}: {'; '.join(found)}. "
                "Start both with the same settings"
            )
