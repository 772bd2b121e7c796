"""What the runtime raises for a call, as statuses of HTTP."""

from __future__ import annotations

import pytest

from dynamo_vllm.serving.calls.failures import WorkerLost, read


class InvalidArgument(Exception):
    """Named as the runtime's."""


@pytest.mark.parametrize(
    ("raised", "status", "message", "parameter"),
    [
        (InvalidArgument("documents[1]: is empty"), 400, "documents[1]: is empty", "documents[1]"),
        (InvalidArgument("body.input: wrong"), 400, "body.input: wrong", "body.input"),
        (InvalidArgument("No such thing: x"), 400, "No such thing: x", None),
        (ValueError('NotFound: {"message":"no model","code":404}'), 404, "no model", None),
        (ValueError('Unavailable: {"message":"busy","code":503}'), 503, "busy", None),
        (ValueError('Internal: {"message":"odd","code":7}'), 500, "odd", None),
        (ValueError("Internal: {not JSON"), 502, "the worker failed", None),
        (Exception("InvalidRequest: Request payload is too large for this"), 413, None, None),
        (ValueError("Internal: secrets of the machine"), 500, "the worker failed", None),
        (Exception("invalid type: integer `1` as u128, expected any valid"), 400, None, None),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), 400, None, None),
        (RuntimeError(), 500, "the worker failed", None),
    ],
)
def test_refusal_keeps_its_status(
    raised: Exception, status: int, message: str | None, parameter: str | None
) -> None:
    found = read(raised)
    assert (found.status, found.parameter) == (status, parameter)
    assert message is None or found.message == message
    assert not isinstance(found, WorkerLost)


def test_lost_worker_is_another_thing_than_a_busy_one() -> None:
    for reason in (
        "TCP connection to 127.0.0.1:1 failed",
        "instance_id=1 not found for endpoint a/b/c",
        "Stream ended before generation completed",
        "this worker is leaving",
    ):
        failure = read(ValueError(f"Unavailable: {reason}"))
        assert isinstance(failure, WorkerLost) and failure.status == 503
