"""Endpoints of upstream's workers answer on the request plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.adapters import make_adapter
from harness.plane import Plane, plane
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def with_adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("named")) as made:
        made.start_frontend()
        made.start_worker(*fake(model, adapters=2), env={"DYN_LORA_ENABLED": "1"})
        yield made.wait_ready()


def called(over: Plane, endpoint: str, request: dict[str, Any]) -> dict[str, Any]:
    answer = over.call(f"backend.{endpoint}", request)
    (chunk,) = answer["chunks"]
    return dict(chunk)


def test_named_endpoints_answer_on_the_request_plane(
    with_adapters: Stack, model: Path, tmp_path: Path
) -> None:
    folder = make_adapter(tmp_path / "adapter", model)
    with plane(with_adapters.environment()) as over:
        request = {"lora_name": "sql", "source": {"uri": f"file://{folder}"}}
        loaded = called(over, "load_lora", request)
        assert (loaded["status"], loaded["lora_name"], loaded["already_loaded"]) == ("success", "sql", False)
        assert called(over, "load_lora", request)["already_loaded"] is True
        until("the adapter", lambda: "sql" in with_adapters.models())
        found = called(over, "list_loras", {})
        assert (found["status"], found["count"]) == ("success", 1)
        assert [(lora["name"], lora["id"]) for lora in found["loras"]] == [("sql", loaded["lora_id"])]
        assert called(over, "clear_kv_blocks", {}) == {"status": "success", "kinds": ["prefix"]}
        assert called(over, "unload_lora", {"lora_name": "sql"})["status"] == "success"
        assert called(over, "list_loras", {})["count"] == 0
        until("no adapter", lambda: "sql" not in with_adapters.models())
        again = called(over, "unload_lora", {"lora_name": "sql"})
        assert (again["status"], again["code"]) == ("error", 404)
