"""Answers Envoy's two questions about each request: whose key is it, and may it ask for this."""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import parse_qs

from dynamo_vllm.gateway import cost, identity
from dynamo_vllm.gateway.control import bodies
from dynamo_vllm.gateway.control.pending_bodies import PendingBodies
from dynamo_vllm.gateway.control.web_pages import WebPages
from dynamo_vllm.gateway.envoy import config, routes
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.gateway.store.key_ring import NoKey
from dynamo_vllm.gateway.store.keys import class_of
from dynamo_vllm.gateway.store.limits import Refused
from dynamo_vllm.serving.usage.record import Admitted

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from dynamo_vllm.gateway.envoy.routes import Route
    from dynamo_vllm.gateway.fairness import FairShares
    from dynamo_vllm.gateway.store.key_ring import KeyRing
    from dynamo_vllm.gateway.store.keys import Key, Tenant
    from dynamo_vllm.gateway.store.limits import Limiter

    ClientLeft = Callable[[], Awaitable[None]]

T = TypeVar("T")
BEARER = "bearer "
BODY_BYTES = 45 << 20
MODELS = "/v1/models"
JSON_TYPE = re.compile(r"application/(?:[a-z0-9!#$&^_.+-]+\+)?json[ \t]*(?:;.*)?", re.ASCII | re.IGNORECASE)
FORM_TYPE = re.compile(r"multipart/form-data[ \t]*;.*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Question:
    """What Envoy tells of a request before anything of its body is read."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]


class Authorizer:
    """Returns headers for the request, or raises GatewayError with what the client gets."""

    def __init__(
        self,
        ring: KeyRing,
        limits: Limiter,
        shares: FairShares,
        ledger_id: str,
        *,
        share_cache: bool,
        web_pages: WebPages | None = None,
        body_bytes: int = BODY_BYTES,
    ) -> None:
        """`body_bytes` is the most that Envoy takes of one body."""
        self._ring = ring
        self._limits = limits
        self._shares = shares
        self._ledger_id = ledger_id
        self._share_cache = share_cache
        self._web_pages = web_pages or WebPages()
        self._bodies = PendingBodies(body_bytes)
        self._checks: dict[str, bool] = {}
        """Requests whose limits are being asked, and whether they have ended meanwhile."""

    async def check_key(self, question: Question, client_left: ClientLeft) -> dict[str, str]:
        """Find the caller, and wait until there is room for the request of a tenant that has many."""
        path, headers = question.path, question.headers
        if self._ring.is_open:
            self._web_pages.check(headers)
        key = self._key(headers)
        route = routes.find(path)
        if route is None:
            raise GatewayError(404, f"there is no {path}")
        check_path(key, route, path)
        check_form(route, question)
        tenant = self._ring.tenant(key.tenant)
        request_id = str(uuid.uuid4())
        answer = {
            identity.KEY: key.id,
            identity.TENANT: key.tenant,
            identity.CLASS: class_of(key, tenant),
            identity.REQUEST: request_id,
        }
        if key.scopes.admin:
            answer[identity.ADMIN] = "1"
        if key.scopes.models and (path + "/").startswith(MODELS + "/"):
            answer[identity.MODELS] = identity.models_text(key.scopes.models)
        if route.is_socket:
            allow_model(key, socket_model(question.query))
        if route.uses_engine:
            answer |= await self._enter(request_id, key, tenant, path, client_left)
        if route.is_socket:  # without RUNTIME_ID: it may have many requests
            answer |= await self._admit_socket(request_id, key, tenant, path, client_left)
        elif route.uses_engine:
            answer[identity.RUNTIME_ID] = request_id
            if route.reads_body:
                await self._begin_body(request_id, key.tenant, headers, client_left)
        elif route.counts(question.method):
            await self._count(request_id, key, tenant, client_left)
            if question.method == "POST" and not (route.below or route.takes_file):
                await self._begin_body(request_id, key.tenant, headers, client_left)
        return answer

    def _key(self, headers: Mapping[str, str]) -> Key:
        secret = headers.get("x-api-key", "")
        authorization = headers.get("authorization", "")
        if authorization.lower().startswith(BEARER):
            secret = authorization[len(BEARER) :].strip()
        if not secret and not self._ring.is_open:
            raise unauthorized(
                "this server needs an API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                "missing_api_key",
            )
        key = self._ring.find(secret)
        if isinstance(key, NoKey):
            raise unauthorized(f"the API key {key.value}", "invalid_api_key")
        return key

    async def _enter(
        self, request_id: str, key: Key, tenant: Tenant, path: str, client_left: ClientLeft
    ) -> dict[str, str]:
        """Wait for the request's turn; return what the frontend must know of it."""
        if routes.costs_tokens(path) and self._shares.must_wait(key.tenant):
            await unless(client_left(), self._shares.wait(key.tenant))
        priority = str(self._shares.enter(request_id, key.tenant, class_of(key, tenant)))
        answer = {identity.PRIORITY: priority, identity.STRICT_PRIORITY: priority}
        if not self._ring.is_open:  # nobody pays
            answer[identity.METERED] = Admitted(request_id, key.id, self._ledger_id).metadata
        if not (self._share_cache or tenant.shares_cache):
            answer[identity.CACHE_SALT] = key.tenant
        return answer

    async def _begin_body(
        self, request_id: str, tenant: str, headers: Mapping[str, str], client_left: ClientLeft
    ) -> None:
        length = headers.get(config.DECLARED, "")
        declared = int(length) if length.isascii() and length.isdigit() and len(length) < 19 else None
        if self._bodies.begin_at_once(request_id, tenant, declared):
            return
        try:
            await unless(client_left(), self._bodies.begin(request_id, tenant, declared))
        except BaseException:
            self._bodies.end(request_id)
            self._shares.leave(request_id)
            raise

    async def _admit_socket(
        self, request_id: str, key: Key, tenant: Tenant, path: str, client_left: ClientLeft
    ) -> dict[str, str]:
        """Reserve for a WebSocket what a request without a limit of its own reserves, until it ends."""
        tokens = cost.worst_case(path, cost.Size(0))
        try:
            outcome = await unless(client_left(), self._limits.admit(request_id, key, tenant, tokens))
            if isinstance(outcome, Refused):
                raise outcome.error()
        except BaseException:
            self._shares.leave(request_id)
            raise
        return outcome.headers()

    async def _count(self, request_id: str, key: Key, tenant: Tenant, client_left: ClientLeft) -> None:
        """Count a request that no engine works for: it needs no tokens and no place among others."""
        if key.limits.requests_per_minute is None and tenant.limits.requests_per_minute is None:
            return
        counting = self._limits.admit(request_id, key, tenant, 0, is_over=True)
        outcome = await unless(client_left(), counting)
        if isinstance(outcome, Refused):
            raise outcome.error()

    async def check_body(
        self, path: str, headers: Mapping[str, str], body: bytes, client_left: ClientLeft
    ) -> dict[str, str]:
        """Decide about a JSON body, and take what the request may use from the key's limits."""
        request_id = headers.get(identity.REQUEST, "")
        try:
            model, choice = bodies.read(path, body)
            key = self._known_key(headers)
            allow_model(key, model)
            answer = {identity.MODEL: model, routes.CHOICE: choice}
            if key.limits.are_none and self._ring.tenant(key.tenant).limits.are_none:
                return answer
            size = cost.size_of(body)
            return answer | await unless(client_left(), self.check_limits(path, headers, size))
        finally:
            self._bodies.end(request_id)

    def check_model(self, headers: Mapping[str, str]) -> None:
        """Refuse a model that the key is not for."""
        allow_model(self._known_key(headers), headers.get(identity.MODEL, ""))

    async def check_limits(
        self, path: str, headers: Mapping[str, str], size: cost.Size | None = None
    ) -> dict[str, str]:
        """Reserve what the request may use; a form has no size that says how many tokens it costs."""
        key, request_id = self._known_key(headers), headers.get(identity.REQUEST, "")
        tokens = cost.worst_case(path, size or cost.Size(0)) if routes.costs_tokens(path) else 0
        self._checks[request_id] = False
        try:
            outcome = await self._limits.admit(request_id, key, self._ring.tenant(key.tenant), tokens)
            if self._checks.get(request_id) and not isinstance(outcome, Refused):
                await self._limits.release([request_id])
                raise client_has_left()
        finally:
            self._checks.pop(request_id, None)
        if isinstance(outcome, Refused):
            raise outcome.error()
        return outcome.headers()

    def ended(self, request_id: str) -> None:
        """Note that a request has ended, so that what is reserved for it from now on is given back."""
        self._bodies.end(request_id)
        if request_id in self._checks:
            self._checks[request_id] = True

    def _known_key(self, headers: Mapping[str, str]) -> Key:
        key = self._ring.key(headers.get(identity.KEY, ""))
        if key is None:
            raise unauthorized(f"the API key {NoKey.UNKNOWN.value}", "invalid_api_key")
        return key


def check_path(key: Key, route: Route, path: str) -> None:
    """Refuse a path that the key is not for."""
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


def check_form(route: Route, question: Question) -> None:
    """Refuse a method or a content type that the path does not have.

    A browser sends some content types for every page, so that nothing else may count as JSON.
    """
    if route.reads_body and question.method != "POST":
        raise GatewayError(
            405, f"there is no {question.method} {question.path}; send a POST", headers={"allow": "POST"}
        )
    if route.to != routes.CONTROL and not route.reads_body:
        return
    if question.method not in routes.CHANGING:
        return
    content_type = question.headers.get("content-type", "")
    if route.takes_form or route.takes_file:
        if not FORM_TYPE.fullmatch(content_type):
            raise wrong_type(question.path, content_type, "multipart/form-data")
    elif not JSON_TYPE.fullmatch(content_type) and (content_type or not route.below):
        raise wrong_type(question.path, content_type, "application/json")


def wrong_type(path: str, content_type: str, right: str) -> GatewayError:
    sent = f"not {content_type!r}" if content_type else "and this request has no content type"
    return GatewayError(415, f"{path} takes {right}, {sent}", code="unsupported_media_type")


def allow_model(key: Key, model: str) -> None:
    """Refuse a model that the key is not for."""
    if not key.scopes.allow_model(model):
        subject = f"the model {model!r}" if model else "a request without a model"
        raise GatewayError(
            403,
            f"the key {key.prefix} may not use {subject}; it may use {', '.join(key.scopes.models)}",
            parameter="model",
            code="model_not_allowed",
        )


def socket_model(query: str) -> str:
    """Return the model in the query of a WebSocket; none if there are several."""
    models = parse_qs(query, keep_blank_values=True).get("model", [])
    return models[0] if len(models) == 1 else ""


async def unless(event: Awaitable[None], step: Awaitable[T]) -> T:
    """Wait for the step; raise if the event comes first."""
    tasks = asyncio.ensure_future(step), asyncio.ensure_future(event)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise client_has_left()
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()


def client_has_left() -> GatewayError:
    return GatewayError(499, "the client has left")


def unauthorized(message: str, code: str) -> GatewayError:
    return GatewayError(401, message, code=code, headers={"www-authenticate": "Bearer"})
