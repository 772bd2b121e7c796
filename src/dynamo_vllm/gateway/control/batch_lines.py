"""Decides about each line of a batch as about a request of its key, at the lowest class."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.control.authorization import BYTES_PER_TOKEN, DEFAULT_TOKENS, check_nvext
from dynamo_vllm.gateway.fairness import priority
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.keys import BATCH
from dynamo_vllm.gateway.store.limits import Refused
from dynamo_vllm.serving.usage.record import Admitted

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.store.key_ring import KeyRing
    from dynamo_vllm.gateway.store.limits import Limiter

LINES = uuid.UUID("6d0c7b53-3d6a-4c0e-9a51-52c0f8f5a1d4")
"""Makes ids of lines; a line that runs again has the same one."""
WAIT_SECONDS = 30.0
"""The longest pause before a line that its key's limits do not allow yet is tried again."""


class _Asked(msgspec.Struct):
    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    max_output_tokens: Any = None

    @property
    def tokens(self) -> int:
        named = (self.max_tokens, self.max_completion_tokens, self.max_output_tokens)
        return max((one for one in named if isinstance(one, int)), default=DEFAULT_TOKENS)


class BatchLines:
    """Waits where a request of a client would be told to come again."""

    def __init__(
        self, ring: KeyRing, limits: Limiter, ledger_id: str, on_ended: Callable[[str], None]
    ) -> None:
        self._ring = ring
        self._limits = limits
        self._ledger_id = ledger_id
        self._on_ended = on_ended

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        key = self._ring.usable(key_id)
        if key is None:
            raise GatewayError(401, "the key of this batch is no longer valid", code="invalid_api_key")
        check_nvext(body)
        asked = _read(body)
        if not key.scopes.allow_path(path) or not key.scopes.allow_model(str(asked.model)):
            raise GatewayError(
                403, f"the key {key.prefix} may not use {asked.model!r} on {path}", parameter="model"
            )
        tokens = len(body) // BYTES_PER_TOKEN + asked.tokens
        while True:
            outcome = await self._limits.admit(request_id, key, self._ring.tenant(key.tenant), tokens)
            if not isinstance(outcome, Refused):
                break
            if outcome.retry_after is None:
                raise outcome.error()
            await asyncio.sleep(min(outcome.retry_after, WAIT_SECONDS))
        place = str(priority(BATCH, 0))
        return {
            identity.METERED: Admitted(request_id, key_id, self._ledger_id).metadata,
            identity.RUNTIME_ID: str(uuid.uuid5(LINES, request_id)),
            identity.PRIORITY: place,
            identity.STRICT_PRIORITY: place,
        }

    def ended(self, request_id: str) -> None:
        self._on_ended(request_id)


def _read(body: bytes) -> _Asked:
    try:
        return msgspec.json.decode(body, type=_Asked)
    except msgspec.DecodeError:  # the frontend says what is wrong with it
        return _Asked()
