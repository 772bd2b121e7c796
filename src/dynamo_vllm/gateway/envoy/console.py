"""Describes how Envoy passes requests below /console/ on to the web console, which has a login of its own.

A browser cannot send a key when it opens a page, so no key is asked for here: without a login the console
answers its page and its login, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.gateway import identity
from dynamo_vllm.gateway.envoy.words import AUTHZ, CORS, Json, no_authz, no_filter

if TYPE_CHECKING:
    from dynamo_vllm.gateway.envoy.settings import EnvoySettings

CONSOLE = "console"
PATH = "/console/"
MOST_REQUESTS = 512
"""The console answers at once whoever has no login, so only many of them at the same moment are as many."""
IDLE_SECONDS = 1800.0
"""A restart that somebody asked for says nothing while a model is loaded."""
REMOVED = ("x-api-key", "proxy-authorization")
"""The cookie is the console's; `authorization` is a key that its user typed, for requests to models."""


def routes(s: EnvoySettings) -> list[Json]:
    client = {"key": identity.CLIENT, "value": "%DOWNSTREAM_REMOTE_ADDRESS_WITHOUT_PORT%"}
    filters = {
        AUTHZ: no_authz(),
        f"{AUTHZ}.body": no_authz(),
        # Pages of others may use the APIs, never the console.
        CORS: no_filter(),
    }
    whole: Json = {
        "match": {"prefix": PATH},
        "route": {
            "cluster": CONSOLE,
            "prefix_rewrite": "/",
            "timeout": "0s",
            "idle_timeout": f"{max(s.stream_idle_seconds, IDLE_SECONDS)}s",
        },
        "request_headers_to_remove": [*REMOVED],
        "request_headers_to_add": [{"header": client, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
        "typed_per_filter_config": filters,
    }
    # Relative, so that it is right behind another proxy too.
    place = {"key": "location", "value": PATH.lstrip("/")}
    without_slash: Json = {
        "match": {"path": PATH.rstrip("/")},
        "direct_response": {"status": 308},
        "response_headers_to_add": [{"header": place, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
        "typed_per_filter_config": filters,
    }
    return [whole, without_slash]
