"""Sends a client's request to a worker of its model, as the frontend would: same caller, same errors."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.body_parts import refuse_many_values
from dynamo_vllm.gateway.exchange import decoded, while_connected
from dynamo_vllm.gateway.replies import GatewayError
from dynamo_vllm.serving.calls.caller import Call
from dynamo_vllm.serving.calls.failures import CallFailed
from dynamo_vllm.wire_pooling import API

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from starlette.requests import Request

    from dynamo_vllm.serving.calls.caller import Caller, Chunk

_METADATA = "x-dynamo-meta-"
"""Headers with this prefix become metadata of the request, without it."""


class Workers:
    """Calls workers for clients."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def whole(self, request: Request, api: str, body: Mapping[str, Any]) -> list[Chunk]:
        """Return the worker's chunks; the worker stops when the client goes away.

        The request's body must have been read.
        """
        return await while_connected(request, self._whole(call_for(request.headers, api, body)))

    async def _whole(self, call: Call) -> list[Chunk]:
        with refusals():
            return await self._caller.whole(call)

    async def stream(
        self, request: Request, api: str, body: Mapping[str, Any]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the worker's chunks; close it, or cancel its reader, to stop the worker."""
        with refusals():
            async with contextlib.aclosing(
                self._caller.stream(call_for(request.headers, api, body))
            ) as chunks:
                async for chunk in chunks:
                    yield chunk


def call_for(headers: Mapping[str, str], api: str, body: Mapping[str, Any]) -> Call:
    """Return the call of a request; the gateway's priority and cache salt replace those of the body."""
    caller = identity.caller_of(headers)
    priority = caller.for_frontend.get(identity.PRIORITY, "0")
    ours: dict[str, Any] = {API: api, "priority": -int(priority)}  # vLLM takes the lowest first
    if (salt := caller.for_frontend.get(identity.CACHE_SALT)) is not None:
        ours["cache_salt"] = salt
    names = [name for name in headers if name.startswith(_METADATA)]
    return Call(
        model=body["model"],
        api=api,
        body={name: value for name, value in body.items() if not name.startswith("_")} | ours,
        request_id=caller.for_frontend.get(identity.RUNTIME_ID) or caller.request_id,
        metadata={name.removeprefix(_METADATA): headers[name] for name in names},
    )


@contextlib.contextmanager
def refusals() -> Any:
    """Raise what a worker refuses as GatewayError."""
    try:
        yield
    except CallFailed as exc:
        raise GatewayError(exc.status, exc.message, parameter=exc.parameter) from exc


def read_fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body that names a model; null is a field that is not there.

    LangChain's CohereRerank sends "max_tokens_per_doc": null.
    """
    refuse_many_values(body)
    fields = {name: value for name, value in decoded(body, dict[str, Any]).items() if value is not None}
    if not isinstance(fields.get("model"), str) or not fields["model"]:
        raise (
            missing("model")
            if "model" not in fields
            else GatewayError(400, "model is the name of a model", parameter="model")
        )
    return fields


def missing(name: str) -> GatewayError:
    return GatewayError(400, f"{name} is missing", parameter=name)
