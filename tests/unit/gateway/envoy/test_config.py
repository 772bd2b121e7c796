"""What Envoy is told: bounds of memory and time, and where a body is read."""

from __future__ import annotations

import json

from dynamo_vllm.gateway.control.pending_bodies import FORGET_SECONDS
from dynamo_vllm.gateway.envoy import config, routes
from dynamo_vllm.gateway.envoy.settings import LEAST_HEAP_BYTES, MOST_HEAP_BYTES, EnvoySettings, heap_for
from dynamo_vllm.gateway.envoy.words import AUTHZ, Json

LARGEST_FILE = 200 << 20
"""Of a batch, as OpenAI has it."""
SETTINGS = EnvoySettings(
    host="0.0.0.0",
    port=1,
    frontends=("http://f:1",),
    control_socket="/c",
    admin_socket="/a",
    status_port=2,
    heap_bytes=1 << 30,
)


def routes_of(document: Json) -> list[Json]:
    manager = document["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    found: list[Json] = manager["route_config"]["virtual_hosts"][0]["routes"]
    return found


def test_the_heap_follows_from_the_memory_of_the_machine() -> None:
    heaps = [heap_for(memory) for memory in (1 << 30, 8 << 30, 1 << 40)]
    assert heaps == [LEAST_HEAP_BYTES, 2 << 30, MOST_HEAP_BYTES]


def test_above_its_heap_envoy_refuses_requests_and_probes_still_answer() -> None:
    document = config.document(SETTINGS)
    overload = document["overload_manager"]
    heaps = [monitor["typed_config"].get("max_heap_size_bytes") for monitor in overload["resource_monitors"]]
    assert heaps == [None, 1 << 30]
    actions = {action["name"].rpartition(".")[2] for action in overload["actions"]}
    assert actions == {"shrink_heap", "stop_accepting_requests", "reset_high_memory_stream"}
    public, status = document["static_resources"]["listeners"]
    assert status["bypass_overload_manager"] and "bypass_overload_manager" not in public


def test_the_largest_file_fits_into_the_time_of_a_body_for_a_slow_client() -> None:
    assert LARGEST_FILE / (64 << 10) + 60 < SETTINGS.body_seconds <= FORGET_SECONDS


def test_bodies_are_shown_to_the_control_app_where_they_name_a_model_and_nowhere_else() -> None:
    for route, written in zip(routes.ROUTES, routes_of(config.document(SETTINGS)), strict=True):
        off = {
            name for name, value in written.get("typed_per_filter_config", {}).items() if value["disabled"]
        }
        assert (f"{AUTHZ}.body" not in off) == route.reads_body, route.path
        assert (AUTHZ in off) == route.is_public, route.path


def test_nothing_in_envoy_reads_json_or_holds_a_body_before_the_key_is_known() -> None:
    text = json.dumps(config.document(SETTINGS))
    assert "json_to_metadata" not in text and "request_body_buffer_limit" not in text
    assert text.count("with_request_body") == 1
