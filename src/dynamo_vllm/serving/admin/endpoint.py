"""Serves admin verbs over the runtime: one endpoint for all of them, and separate ones for some."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from dynamo_vllm.admin.base import AT_REST
from dynamo_vllm.admin.verbs import VERBS, failure, perform
from dynamo_vllm.errors import BadCommand, NotAllowed

if TYPE_CHECKING:
    from dynamo_vllm.admin.base import Controls, Reply
    from dynamo_vllm.errors import EngineDead
    from dynamo_vllm.serving.plane.runtime import Runtime

Handler = Callable[[Any, Any], AsyncIterator[dict[str, Any]]]
ENDPOINT = "admin.control"
"""The same in every namespace, whatever the worker's component: callers find all workers here."""


def handled(address: str) -> dict[str, str | None]:
    """The endpoints besides a worker's own, with the verb of each; None means all verbs."""
    namespace, component, _ = address.split(".")
    own = {f"{namespace}.{component}.{name}": name for name, verb in VERBS.items() if verb.has_endpoint}
    return {f"{namespace}.{ENDPOINT}": None, **own}


class Admin:
    """Runs verbs for callers that are allowed to."""

    def __init__(self, worker: Controls, token: str | None, on_dead: Callable[[EngineDead], None]) -> None:
        self._worker = worker
        self._token = token
        self._on_dead = on_dead

    def serve(self, drt: Runtime, address: str) -> None:
        """`address` is the worker's own: namespace.component.endpoint."""
        for where, verb in handled(address).items():
            handler: Handler = self._handle_any if verb is None else self._handler_of(verb)
            drt.serve(where, handler, "admin verbs work on the system port only")

    async def perform(self, name: str, body: object) -> Reply:
        """Run a verb for a caller that is allowed to."""
        return await perform(name, body, self._worker, self._on_dead)

    def is_token(self, given: str | None) -> bool:
        """Return whether the token is right; without one every caller on the request plane is allowed."""
        if self._token is None:
            return True
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())

    @property
    def has_token(self) -> bool:
        return self._token is not None

    @property
    def is_at_rest(self) -> bool:
        """Return whether an operator took the worker out of service."""
        return self._worker.life.state in AT_REST

    async def _handle_any(self, request: object, context: object) -> AsyncIterator[Reply]:
        """Take {"verb", "body", "token"} and yield one reply."""
        if not isinstance(request, dict) or not isinstance(request.get("verb"), str):
            yield failure(BadCommand('a command is {"verb": NAME, "body": {…}}'))
            return
        yield await self._checked(request["verb"], request.get("body"), request.get("token"))

    def _handler_of(self, name: str) -> Handler:
        async def handler(request: object, context: object) -> AsyncIterator[Reply]:
            body = dict(request) if isinstance(request, dict) else {}
            token = body.pop("token", None)
            yield await self._checked(name, body, token)

        return handler

    async def _checked(self, name: str, body: object, token: object) -> Reply:
        if not self.is_token(token if isinstance(token, str) else None):
            return failure(NotAllowed("the admin token is missing or wrong"))
        return await self.perform(name, body)
