"""Tests what we rely on in the Python bindings of the runtime."""

from __future__ import annotations

import inspect

import dynamo.llm
import dynamo.llm.exceptions
import dynamo.runtime
import pytest

# Every exception of the runtime: what a worker that raises it means by it, or why ours never does.
MEANING = {
    "DynamoException": "base class",
    "InvalidArgument": "raised: 400 with our message",
    "StreamIncomplete": "raised: the request moves to another worker",
    "EngineShutdown": "raised: the engine is dead, the request moves",
    "HttpError": "raised: 404, 500, 503",
    "Unknown": "not raised: HttpError(500) says the same and keeps the status",
    "Cancelled": "not raised: a client that left gets no answer",
    "CannotConnect": "the frontend's own",
    "Disconnected": "the frontend's own",
    "ConnectionTimeout": "the frontend's own",
    "WorkerUnavailable": "the frontend's own",
    "RouterQueueLimitExceeded": "the router's own",
    "SelectionServiceError": "the router's own",
}


def test_every_exception_of_the_runtime_has_a_meaning() -> None:
    found = {
        name
        for name, value in vars(dynamo.llm.exceptions).items()
        if inspect.isclass(value) and issubclass(value, Exception)
    }
    assert found == set(MEANING)


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (
            dynamo.runtime.Endpoint,
            {"serve_endpoint", "client", "connection_id", "first_token_source", "metrics"},
        ),
        (dynamo.runtime.Endpoint, {"register_endpoint_instance", "unregister_endpoint_instance"}),
        (dynamo.runtime.DistributedRuntime, {"endpoint", "shutdown", "set_health_status"}),
        (dynamo.runtime.Context, {"id", "is_stopped", "is_killed", "notify_first_token", "trace_headers"}),
        (dynamo.runtime.Client, {"instances", "direct"}),
        (dynamo.llm.WorkerMetricsPublisher, {"create_endpoint", "publish"}),
        (dynamo.llm.FrontendExtensionContext, {"serving_ready_display_names", "is_ready", "is_cancelled"}),
    ],
)
def test_names(owner: type, names: set[str]) -> None:
    assert names <= set(dir(owner))


def test_card_has_the_fields_we_set() -> None:
    card = dynamo.llm.ModelRuntimeConfig()
    for name in (
        "context_length",
        "total_kv_blocks",
        "max_num_seqs",
        "max_num_batched_tokens",
        "data_parallel_size",
        "data_parallel_start_rank",
        "kv_event_publishing_enabled",
        "enable_local_indexer",
        "tool_call_parser",
        "reasoning_parser",
        "exclude_tools_when_tool_choice_none",
    ):
        assert hasattr(card, name), name
