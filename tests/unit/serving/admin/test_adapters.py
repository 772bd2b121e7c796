"""The steps of loading an adapter over the real parts, where these fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.config import build
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.errors import NotListed
from dynamo_vllm.job import Adapter
from dynamo_vllm.lora.files import AdapterFiles
from dynamo_vllm.lora.sources.base import SourceLimits
from dynamo_vllm.roles.aggregated import CARD
from dynamo_vllm.serving.admin.adapters import AdapterSteps
from dynamo_vllm.serving.plane.registration import Registration
from harness.fakes import make_worker


async def test_card_that_discovery_does_not_let_go_is_no_success(tmp_path: Path) -> None:
    """The frontend would list an adapter that no worker has."""
    worker = await make_worker()
    options, _ = build.parse(WorkerOptions, ["--model", "m"], {}, "worker", "")
    nowhere: Any = object()  # the runtime refuses to talk through it
    registration = Registration(nowhere, options, CARD, worker.facts, str(tmp_path))
    steps = AdapterSteps(AdapterFiles(tmp_path, SourceLimits(), 8), worker.engine, registration)
    with pytest.raises(NotListed, match="did not remove it"):
        await steps.withdraw(Adapter("sql", 1, "/sql", "sql"))
