"""The store in SQLite, with two gateways on one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dynamo_vllm.gateway.database import Database
from harness import gateway_store


class TestStore(gateway_store.TwoGateways):
    @pytest.fixture
    def open_database(self, tmp_path: Path) -> Callable[[], Database]:
        return lambda: gateway_store.opened(f"sqlite:///{tmp_path}/gateway.db")
