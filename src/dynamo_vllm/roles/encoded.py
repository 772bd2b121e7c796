"""Uses media that an encode worker has encoded, and falls back to the worker's own vision encoder.

There are two ways. Direct: the worker reads the encoder output from the folder, checks it, and passes it to
its engine instead of pixels; nothing is fetched or decoded here. Connector: the worker reads the media as
usual, and the engine finds the output in the folder when it would encode.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.engine.encoder_cache.folder import Unusable
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.job import Media
from dynamo_vllm.roles import encode
from dynamo_vllm.roles.media import routed

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from dynamo_vllm.engine.base import EncodedMedia
    from dynamo_vllm.job import MediaPrompt
    from dynamo_vllm.media.base import MediaRef
    from dynamo_vllm.roles.media import MediaReader

logger = logging.getLogger(__name__)
DIRECT_KINDS = frozenset({"image"})
"""Kinds with direct transfer; requests with others are encoded here."""


def kinds_encoded_here(media: Mapping[str, int]) -> list[str]:
    """Return the kinds that a worker with direct transfer encodes itself, of those that its model takes."""
    return sorted(kind for kind, most in media.items() if most and kind not in DIRECT_KINDS)


class NoEncoder(DynamoVllmError):
    """No encode worker did it; the text says why."""


class Encoders(Protocol):
    async def encode(self, job_id: str, request: dict[str, object]) -> encode.Handoff:
        """Call the next encode worker; cancelling stops the work there.

        Raises NoEncoder, or the encode worker's refusal of the client's media.
        """


class EncodedReader:
    """Calls encode workers first, and reads media itself if none of them succeeded.

    Without a part of the engine to take their output `direct`, it comes by connector.
    """

    def __init__(
        self,
        own: MediaReader,
        direct: EncodedMedia | None,
        encoders: Encoders,
        on_lost: Callable[[], None],
        has_own_names: bool = False,
    ) -> None:
        """`has_own_names` is for connectors that know media only by the names of encode workers, without the
        router's prefix."""
        self._own = own
        self._direct = direct
        self._encoders = encoders
        self._on_lost = on_lost
        self._has_own_names = has_own_names

    def refuse(self, refs: Sequence[MediaRef]) -> None:
        self._own.refuse(refs)

    async def read(
        self,
        ids: Sequence[int],
        refs: Sequence[MediaRef],
        salt: str | None,
        names: Sequence[str] = (),
        job_id: str = "",
    ) -> MediaPrompt:
        self.refuse(refs)
        request = encode.request(ids, refs, salt)
        if self._direct is None:
            encoding = self._encode_elsewhere(job_id, request, refs)
            media = await self._loaded_while(encoding, refs, salt, () if self._has_own_names else names)
            return await self._own.put_into_prompt(ids, media)
        if {ref.kind for ref in refs} <= DIRECT_KINDS:
            handoff = await self._encode_elsewhere(job_id, request, refs)
            if handoff is not None:
                try:
                    return await self._read_handoff(self._direct, ids, handoff, names)
                except Unusable as exc:
                    self._lost(job_id, str(exc))
        return await self._own.read(ids, refs, salt, names)

    async def _loaded_while(
        self,
        encoding: Coroutine[object, object, object],
        refs: Sequence[MediaRef],
        salt: str | None,
        names: Sequence[str],
    ) -> list[Media]:
        """Read the media here while they are encoded elsewhere; the first refusal ends the other."""
        try:
            async with asyncio.TaskGroup() as group:
                loading = group.create_task(self._own.load(refs, salt, names))
                group.create_task(encoding)
        except BaseExceptionGroup as failed:
            first = failed.exceptions[0]
        else:
            return loading.result()
        raise first

    async def _encode_elsewhere(
        self, job_id: str, request: dict[str, object], refs: Sequence[MediaRef]
    ) -> encode.Handoff | None:
        """Return None if no encode worker succeeded."""
        try:
            handoff = await self._encoders.encode(job_id, request)
            if sorted(encoded.kind for encoded in handoff.encoded) != sorted(ref.kind for ref in refs):
                raise NoEncoder(f"the encode worker returned {len(handoff.encoded)} of {len(refs)} media")
        except NoEncoder as exc:
            self._lost(job_id, str(exc))
            return None
        logger.debug("request %s: %d media were encoded elsewhere", job_id, len(refs))
        return handoff

    async def _read_handoff(
        self, direct: EncodedMedia, ids: Sequence[int], handoff: encode.Handoff, names: Sequence[str]
    ) -> MediaPrompt:
        """Return the prompt with the encoder's output; raises Unusable."""
        for_router: Sequence[str | None] = (
            names if len(names) == len(handoff.encoded) else [None] * len(handoff.encoded)
        )
        media = [
            Media(
                encoded.kind,
                await direct.read(encoded.name),
                routed(encoded.name, name),
            )
            for encoded, name in zip(handoff.encoded, for_router, strict=True)
        ]
        return await self._own.put_into_prompt(ids, media)

    def _lost(self, job_id: str, reason: str) -> None:
        logger.warning("request %s: encoding its media here: %s", job_id, reason)
        self._on_lost()
