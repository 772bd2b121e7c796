"""Answers Envoy's two questions about each request: whose key is it, and may it ask for this."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.gateway import cost, identity
from dynamo_vllm.gateway.envoy import config, routes
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.key_ring import NoKey
from dynamo_vllm.gateway.store.keys import class_of
from dynamo_vllm.gateway.store.limits import Refused
from dynamo_vllm.serving.usage.record import Admitted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dynamo_vllm.gateway.fairness import FairShares
    from dynamo_vllm.gateway.store.key_ring import KeyRing
    from dynamo_vllm.gateway.store.keys import Key
    from dynamo_vllm.gateway.store.limits import Limiter

BYTES_PER_TOKEN = 3
"""For the tokens of a prompt that nobody has counted yet; English has four, code three."""
DEFAULT_TOKENS = 1024
"""Reserved for the answer of a request without a limit of its own."""
MOST_PROMPT_TOKENS = 32768
"""Reserved for one prompt at most: the bytes of an image are not its tokens."""
BEARER = "bearer "


class Authorizer:
    """Returns headers for the request, or raises GatewayError with what the client gets."""

    def __init__(
        self, ring: KeyRing, limits: Limiter, shares: FairShares, ledger_id: str, *, share_cache: bool
    ) -> None:
        self._ring = ring
        self._limits = limits
        self._shares = shares
        self._ledger_id = ledger_id
        self._share_cache = share_cache

    async def check_key(
        self, path: str, headers: Mapping[str, str], client_left: Callable[[], Awaitable[None]]
    ) -> dict[str, str]:
        """Find the caller, and wait until there is room for the request of a tenant that has many."""
        key = self._key(headers)
        route = routes.find(path)
        if route is None:
            raise GatewayError(404, f"there is no {path}")
        if route.needs_admin and not key.scopes.admin:
            raise GatewayError(
                403,
                f"{path} needs a key with --admin; this one ({key.prefix}) has none",
                code="insufficient_permissions",
            )
        if not key.scopes.allow_path(path):
            raise GatewayError(
                403,
                f"the key {key.prefix} may not call {path}; it may call {', '.join(key.scopes.endpoints)}",
                code="insufficient_permissions",
            )
        tenant = self._ring.tenant(key.tenant)
        request_id = str(uuid.uuid4())
        priority_class = class_of(key, tenant)
        found = {
            identity.KEY: key.id,
            identity.TENANT: key.tenant,
            identity.CLASS: priority_class,
            identity.REQUEST: request_id,
        }
        if key.scopes.admin:
            found[identity.ADMIN] = "1"
        if route.reads_body or route.takes_form:
            if routes.costs_tokens(path) and self._shares.must_wait(key.tenant):
                await unless(client_left(), self._shares.wait(key.tenant))
            priority = str(self._shares.enter(request_id, key.tenant, priority_class))
            found[identity.PRIORITY] = found[identity.STRICT_PRIORITY] = priority
            found[identity.RUNTIME_ID] = request_id
            if not self._ring.is_open:  # nobody pays
                found[identity.METERED] = Admitted(request_id, key.id, self._ledger_id).metadata
            if not (self._share_cache or tenant.shares_cache):
                found[identity.CACHE_SALT] = key.tenant
            if key.scopes.models or not (key.limits.are_none and tenant.limits.are_none):
                found[config.CHECK] = "1"
        return found

    def _key(self, headers: Mapping[str, str]) -> Key:
        secret = headers.get("x-api-key", "")
        said = headers.get("authorization", "")
        if said.lower().startswith(BEARER):
            secret = said[len(BEARER) :].strip()
        if not secret and not self._ring.is_open:
            raise unauthorized(
                "this server needs an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "missing_api_key",
            )
        found = self._ring.find(secret)
        if isinstance(found, NoKey):
            raise unauthorized(f"the API key {found.value}", "invalid_api_key")
        return found

    async def check_body(self, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Decide about the model, and take what the request may use from the key's limits."""
        self.check_model(headers)
        return await self.check_limits(path, headers)

    def check_model(self, headers: Mapping[str, str]) -> None:
        """Refuse a model that the key is not for."""
        key = self._known_key(headers)
        model = headers.get(identity.MODEL, "")
        if not key.scopes.allow_model(model):
            subject = f"the model {model!r}" if model else "a request without a model"
            raise GatewayError(
                403,
                f"the key {key.prefix} may not use {subject}; it may use {', '.join(key.scopes.models)}",
                parameter="model",
                code="model_not_allowed",
            )

    async def check_limits(
        self, path: str, headers: Mapping[str, str], size: cost.Size | None = None
    ) -> dict[str, str]:
        """Reserve what the request may use; without a size it follows from what Envoy has read."""
        key = self._known_key(headers)
        tokens = cost.worst_case(path, size) if size is not None else reserved_tokens(headers)
        outcome = await self._limits.admit(
            headers.get(identity.REQUEST, ""),
            key,
            self._ring.tenant(key.tenant),
            tokens if routes.costs_tokens(path) else 0,
        )
        if isinstance(outcome, Refused):
            raise outcome.error()
        return outcome.headers()

    def _known_key(self, headers: Mapping[str, str]) -> Key:
        key = self._ring.key(headers.get(identity.KEY, ""))
        if key is None:
            raise unauthorized(f"the API key {NoKey.UNKNOWN.value}", "invalid_api_key")
        return key


async def unless(event: Awaitable[None], step: Awaitable[None]) -> None:
    """Wait for the step; raise if the event comes first."""
    tasks = [asyncio.ensure_future(step), asyncio.ensure_future(event)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise GatewayError(499, "the client has left")
        tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def check_nvext(body: bytes) -> None:
    """Refuse a request that chooses its worker, or makes the frontend send data elsewhere."""
    try:
        given = msgspec.json.decode(body, type=_WithNvext).nvext
    except msgspec.DecodeError:  # the frontend says what is wrong with it
        return
    for name in config.PINS:
        if isinstance(given, dict) and name in given:
            raise GatewayError(
                400,
                f"nvext.{name} cannot be used through the gateway; leave it out",
                parameter=f"nvext.{name}",
                code="unsupported_parameter",
            )


class _WithNvext(msgspec.Struct):
    nvext: Any = None


def reserved_tokens(headers: Mapping[str, str]) -> int:
    """Return how many tokens a request may cost at most, as far as anybody knows before it ran."""
    prompt = min(number(headers.get(config.BYTES)) // BYTES_PER_TOKEN, MOST_PROMPT_TOKENS)
    return prompt + (number(headers.get(config.MAX_TOKENS)) or DEFAULT_TOKENS)


def number(text: str | None) -> int:
    """Return a count that a client may have written; 0 for what is none."""
    try:
        return max(0, int(float(text or "")))
    except (ValueError, OverflowError):
        return 0


def unauthorized(message: str, code: str) -> GatewayError:
    return GatewayError(401, message, code=code, headers={"www-authenticate": "Bearer"})
