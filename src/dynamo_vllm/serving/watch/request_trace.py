"""Makes frontends send a record of each ended request to the console, and tells the console who sent it.

The runtime (1.6.1) writes such records to one of several sinks; of these only OpenTelemetry's log records
neither grow on a disk nor need a server. A record has times, numbers of tokens, worker ids and hashes of
blocks, and never text. A frontend sends its own router settings with the address, so that the console
computes with the settings of each.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qsl, urlencode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import FrontendOptions

PATH = "/v1/logs"
VARIABLE = "DYN_VLLM_REQUEST_TRACE_URL"
_OWN = ("DYN_REQUEST_TRACE", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT")
"""With one of these the operator decides where records and log lines go."""


class Sender(NamedTuple):
    """The frontend that sent a record, with the settings of its router."""

    name: str
    settings: tuple[tuple[str, str], ...] = ()


def new_url(port: int) -> str:
    """Return an address for the receiver that nobody can guess; frontends and console get the same."""
    return f"http://127.0.0.1:{port}/{secrets.token_urlsafe(16)}"


def endpoint(options: FrontendOptions, environment: Mapping[str, str]) -> str | None:
    """Return where a frontend sends its records; None if it has no receiver, or exports logs elsewhere."""
    is_taken = options.otlp_endpoint is not None or any(environment.get(name) for name in _OWN)
    if options.request_trace_url is None or is_taken:
        return None
    settings = {
        "name": f"{options.host}:{options.port}",
        "router": options.router,
        "overlap": options.kv_overlap_weight,
        "credit": options.kv_overlap_credit,
        "host": options.router_host_cache_weight,
        "disk": options.router_disk_cache_weight,
        "request_blocks": options.router_request_blocks,
        "temperature": options.router_temperature,
        "uses_events": int(options.use_kv_events),
        "tracks_output": int(options.router_track_output_blocks),
        "is_synced": int(options.router_replica_sync),
    }
    return f"{options.request_trace_url.rstrip('/')}{PATH}?{urlencode(settings)}"


def sender(query: str) -> Sender:
    """Return who sent a record, from the query of its address."""
    found = dict(parse_qsl(query))
    return Sender(found.pop("name", ""), tuple(found.items()))


def variables(url: str | None) -> dict[str, str]:
    """Return the runtime's variables for sending records to this endpoint."""
    if url is None:
        return {}
    return {
        "DYN_REQUEST_TRACE": "1",
        "DYN_REQUEST_TRACE_RECORDS": "request_end",  # never the others: request_payload is the text
        "DYN_REQUEST_TRACE_SINKS": "otel",
        "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
    }
