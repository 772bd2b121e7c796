"""A batch through the whole gateway while its parts are killed: each line is answered once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness import gateway as gateways
from harness.gateway import Gateway
from harness.waiting import until

BODY = {"model": "demo-chat", "max_tokens": 4}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_each_line_is_answered_once_while_gateway_and_worker_are_killed(tmp_path: Path) -> None:
    count = int(os.environ.get("DYNAMO_VLLM_LINES", "10000"))
    with gateways.fake_gateway(tmp_path, "--workers", "2", token_ms=5, prefill_ms=10) as made:
        secret = made.create_key("batcher", "--tenant", "batch", "--tokens-per-day", "1000000000")
        with made.openai(key=secret) as client:
            file = client.files.create(file=("in.jsonl", lines(count)), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            kills = iter([made.workers[0], made.control, None])
            for share in (0.2, 0.5, 0.7):
                wait_for_lines(made, secret, batch.id, int(share * count))
                victim = next(kills) or made.control
                victim.send_signal(signal.SIGKILL)
            until(
                "the end", lambda: shown(made, secret, batch.id).get("status") == "completed", 400, every=0.5
            )
            done = client.batches.retrieve(batch.id)
            assert done.output_file_id and not done.error_file_id
            answers = [
                json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()
            ]
        assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(count))
        used = sum(one["response"]["body"]["usage"]["total_tokens"] for one in answers)
        until("the ledger", lambda: in_ledger(made) == used, 60, every=0.5)


def lines(count: int) -> bytes:
    def each() -> Iterator[bytes]:
        for number in range(count):
            body = {**BODY, "prompt": [20 + number % 300] * (5 + number % 7)}
            line = {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            yield json.dumps(line).encode() + b"\n"

    return b"".join(each())


def wait_for_lines(made: Gateway, secret: str, batch: str, count: int) -> None:
    until(f"{count} lines", lambda: answered(made, secret, batch) >= count, 300, every=0.2)


def answered(made: Gateway, secret: str, batch: str) -> int:
    found = shown(made, secret, batch).get("request_counts")
    return int(found["completed"]) if found else 0


def shown(made: Gateway, secret: str, batch: str) -> dict[str, Any]:
    """Nothing while nobody answers."""
    with contextlib.suppress(httpx.TransportError), made.client(key=secret) as client:
        found: dict[str, Any] = client.get(f"/v1/batches/{batch}").json()
        return found
    return {}


def in_ledger(made: Gateway) -> int:
    """Tokens of the batch's tenant."""
    sql = "SELECT SUM(prompt_tokens + completion_tokens) FROM gateway_usage WHERE tenant = 'batch'"
    with made.database() as database:
        row = database.run_now(lambda t: t.one(sql))
    return int(row[0] or 0) if row is not None else 0
