"""Tests that we know all exceptions of the runtime; the runtime tier uses the rest of it."""

from __future__ import annotations

import inspect

import dynamo.llm.exceptions

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
