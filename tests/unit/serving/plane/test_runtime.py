"""What the runtime of a process remembers of its endpoints."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.plane.runtime import Runtime
from harness.waiting import until_async


class Endpoint:
    """One that ends as it is told."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    async def serve_endpoint(self, handler: Any) -> None:
        raise self.failure


@pytest.mark.parametrize("is_unlisted", [False, True])
async def test_endpoint_that_discovery_did_not_take_stops_the_start(
    is_unlisted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    why = "Unable to register service: busy" if is_unlisted else "the connection broke"
    drt: Any = type("Drt", (), {"endpoint": lambda _, address: Endpoint(RuntimeError(why))})()
    made = Runtime(drt, ["ns.admin.control"])
    made.refuse_unlisted()
    made.serve("ns.admin.control", None, "status does not find it")
    await until_async("the failure", lambda: "status does not find it" in caplog.text)
    await asyncio.sleep(0)
    if is_unlisted:
        with pytest.raises(StartError, match="discovery did not take this worker"):
            made.refuse_unlisted()
    else:
        made.refuse_unlisted()
