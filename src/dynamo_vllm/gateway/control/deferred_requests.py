"""Lets in requests that no client waits for, each as one that a client sends with the same key."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.gateway import cost, identity
from dynamo_vllm.gateway.control.bodies import check_nvext
from dynamo_vllm.gateway.deferred import NotYet
from dynamo_vllm.gateway.fairness import priority
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.keys import BATCH, class_of
from dynamo_vllm.gateway.store.limits import Refused
from dynamo_vllm.serving.usage.record import Admitted

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.fairness import FairShares
    from dynamo_vllm.gateway.store.key_ring import KeyRing
    from dynamo_vllm.gateway.store.keys import Key
    from dynamo_vllm.gateway.store.limits import Limiter

RUNTIME_IDS = uuid.UUID("6d0c7b53-3d6a-4c0e-9a51-52c0f8f5a1d4")
"""Names requests in the runtime; one that runs again has the same name."""
SHOWN_CHARACTERS = 256
"""Of a client's text in an error, which is kept for each line of a batch."""
SHARE_SECONDS = 1.0
"""When a request is tried again whose tenant has more than its part of the engines."""


class _Named(msgspec.Struct):
    model: Any = None


class DeferredRequests:
    """A gate (`deferred.Gate`) for lines of batches, at the lowest class, or for background responses."""

    def __init__(
        self,
        ring: KeyRing,
        limits: Limiter,
        ledger_id: str,
        on_ended: Callable[[str], None],
        *,
        shares: FairShares | None = None,
        share_cache: bool = False,
    ) -> None:
        """`shares` counts these requests among those of their tenant; batches run behind all others."""
        self._ring = ring
        self._limits = limits
        self._ledger_id = ledger_id
        self._on_ended = on_ended
        self._shares = shares
        self._share_cache = share_cache

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        key = self._ring.usable(key_id)
        if key is None:
            raise GatewayError(401, "the key of this request is no longer valid", code="invalid_api_key")
        check_nvext(body)
        model = _model(body)
        if not key.scopes.allow_path(path) or not key.scopes.allow_model(model):
            raise GatewayError(
                403,
                f"the key {key.prefix} may not use {model[:SHOWN_CHARACTERS]!r} on {path}",
                parameter="model",
            )
        tenant = self._ring.tenant(key.tenant)
        if self._shares is not None and self._shares.must_wait(key.tenant):
            raise NotYet(SHARE_SECONDS)
        tokens = cost.of_body(path, body)
        outcome = await self._limits.admit(request_id, key, tenant, tokens, is_deferred=True)
        if isinstance(outcome, Refused):
            if outcome.retry_after is None:
                raise outcome.error()
            raise NotYet(outcome.retry_after)
        return self._headers(request_id, key)

    def _headers(self, request_id: str, key: Key) -> dict[str, str]:
        tenant = self._ring.tenant(key.tenant)
        if self._shares is None:
            place = priority(BATCH, 0)
        else:
            place = self._shares.enter(
                _share_id(request_id), key.tenant, class_of(key, tenant), has_client=False
            )
        headers = {
            identity.RUNTIME_ID: str(uuid.uuid5(RUNTIME_IDS, request_id)),
            identity.PRIORITY: str(place),
            identity.STRICT_PRIORITY: str(place),
        }
        if not self._ring.is_open:  # nobody pays
            headers[identity.METERED] = Admitted(request_id, key.id, self._ledger_id).metadata
        if not (self._share_cache or tenant.shares_cache):
            headers[identity.CACHE_SALT] = key.tenant
        return headers

    def ended(self, request_id: str) -> None:
        if self._shares is not None:
            self._shares.leave(_share_id(request_id))
        self._on_ended(request_id)

    def is_valid(self, key_id: str) -> bool:
        return self._ring.usable(key_id) is not None


def _share_id(request_id: str) -> str:
    """Envoy's word that the client's request has ended does not mean what it left to do."""
    return f"deferred {request_id}"


def _model(body: bytes) -> str:
    try:
        model = msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError) as exc:
        raise GatewayError(400, f"the body is not a JSON object: {exc}") from None
    return model if isinstance(model, str) else ""
