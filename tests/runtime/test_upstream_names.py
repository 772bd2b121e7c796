"""Older spellings start the same worker as newer ones; upstream's endpoints answer on the request plane."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import upstream_map
from harness.adapters import make_adapter
from harness.plane import Plane, plane
from harness.stack import Stack, stack
from harness.waiting import until
from runtime.conftest import fake

pytestmark = pytest.mark.more

SPELLED = {"is_prefill_worker", "is_decode_worker", "disaggregation_mode", "dump_config_to", "system_port"}
SPELLED |= {"multimodal_worker", "route_to_encoder", "vllm_native_encoder_worker"}
SPELLED |= {f"multimodal_{role}_worker" for role in ("encode", "decode", "encode_prefill")}
"""Options that say how the role was spelled, or where this one worker writes and listens."""


# --- endpoints of upstream's workers ----------------------------------------------------------------------


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


def test_metrics_that_are_called_the_same_are_there(with_adapters: Stack) -> None:
    (worker,) = with_adapters.workers
    until("served again", lambda: len(with_adapters.instances()) == 1)
    body = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 2}
    until("an answer", lambda: with_adapters.post("/v1/completions", body).status_code == 200)
    text = httpx.get(f"{worker.system_url}/metrics", timeout=30).text
    rows = [row for row in upstream_map.rows("Metrics") if row.here.startswith("same")]
    named = [name for row in rows for name in row.upstream if "*" not in name]
    assert named and [name for name in named if f"\n# TYPE {name} " not in text] == []
