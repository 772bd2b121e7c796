"""What tests expect of a refusal by the gateway or the console."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.gateway.replies import GatewayError


@contextlib.contextmanager
def refused(status: int, text: str = "", /, **fields: object) -> Iterator[pytest.ExceptionInfo[GatewayError]]:
    """Expect a refusal with this status, this text in its message, and these fields."""
    with pytest.raises((GatewayError, ConsoleError)) as caught:
        yield caught  # type: ignore[misc]
    error: Any = caught.value
    assert (error.status, {name: getattr(error, name) for name in fields}) == (status, fields), error.message
    assert text in error.message
