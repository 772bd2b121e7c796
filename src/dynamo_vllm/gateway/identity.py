"""Names the headers with which the gateway tells the other parts who asks.

Clients cannot send them: Envoy removes every header with one of the prefixes and sets them anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

KEY = "x-gateway-key"
TENANT = "x-gateway-tenant"
CLASS = "x-gateway-class"
ADMIN = "x-gateway-admin"
CLIENT = "x-gateway-client"
"""The address of a client of the web console."""
REQUEST = "x-request-id"
"""The request's name in the answer, in all logs and in the ledger."""
MODEL = "x-gateway-model"
"""What the control app has read of the body, for the access log."""
MODELS = "x-gateway-models"
"""For /v1/models: the models that the key is for, if it is for some."""
METERED = "x-dynamo-meta-gateway"
"""Reaches the worker as metadata of the request: the request's id and the key's, separated by a space."""
RUNTIME_ID = "x-dynamo-request-id"
"""The request's name in the runtime; a request that is sent again with the same one is counted once."""
CACHE_SALT = "x-tenant-id"
PRIORITY = "x-dynamo-request-priority"
STRICT_PRIORITY = "x-dynamo-request-strict-priority"
FOR_FRONTEND = (METERED, RUNTIME_ID, CACHE_SALT, PRIORITY, STRICT_PRIORITY)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request, after the key was checked."""

    key_id: str
    tenant: str
    priority_class: str
    is_admin: bool
    request_id: str
    for_frontend: Mapping[str, str] = field(default_factory=dict)
    """Headers that a request to the frontend must carry, so that its tokens are counted for this caller."""


def caller_of(headers: Mapping[str, str]) -> Caller:
    """Return the caller of a request that came through Envoy."""
    return Caller(
        key_id=headers.get(KEY, ""),
        tenant=headers.get(TENANT, ""),
        priority_class=headers.get(CLASS, ""),
        is_admin=headers.get(ADMIN) == "1",
        request_id=headers.get(REQUEST, ""),
        for_frontend={name: headers[name] for name in FOR_FRONTEND if name in headers},
    )


def models_text(models: Iterable[str]) -> str:
    """Write names of models into a header."""
    return ",".join(quote(model, safe="") for model in models)


def models_of(headers: Mapping[str, str]) -> frozenset[str] | None:
    """Return the models that the caller may see; None for all."""
    models = headers.get(MODELS)
    return None if models is None else frozenset(map(unquote, models.split(",")))
