"""A batch through the whole gateway while its parts are killed: each line is answered once."""

from __future__ import annotations

import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

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
        alone = first_token_ms(made, 40)
        with made.openai(key=secret) as client:
            file = client.files.create(file=("in.jsonl", lines(count)), purpose="batch")
            batch = client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            beside = []
            kills = iter([made.workers[0], made.control, None])
            for share in (0.2, 0.5, 0.7):
                wait_for_lines(made, secret, batch.id, int(share * count))
                beside += first_token_ms(made, 20)
                victim = next(kills) or made.control
                victim.send_signal(signal.SIGKILL)
            until("the end", lambda: status(made, secret, batch.id) == "completed", 400, every=0.5)
            done = client.batches.retrieve(batch.id)
            assert done.output_file_id and not done.error_file_id
            answers = [
                json.loads(line) for line in client.files.content(done.output_file_id).text.splitlines()
            ]
        assert sorted(one["custom_id"] for one in answers) == sorted(f"line-{n}" for n in range(count))
        print(
            f"first token p50: alone {statistics.median(alone):.1f} ms, beside "
            f"{statistics.median(beside):.1f} ms"
        )
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
    try:
        with made.client(key=secret) as client:
            return int(client.get(f"/v1/batches/{batch}").json()["request_counts"]["completed"])
    except (httpx.TransportError, KeyError):
        return 0


def status(made: Gateway, secret: str, batch: str) -> str:
    try:
        with made.client(key=secret) as client:
            return str(client.get(f"/v1/batches/{batch}").json().get("status"))
    except httpx.TransportError:
        return ""


def first_token_ms(made: Gateway, count: int) -> list[float]:
    """Times to the first token of a client that asks one after the other."""
    found = []
    with made.client() as client:
        for _ in range(count):
            began = time.monotonic()
            body = {**BODY, "prompt": [40] * 5, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as answer:
                times = [time.monotonic() for line in answer.iter_lines() if line.startswith("data: {")]
            found.append((times[0] - began) * 1000)
    return found


def in_ledger(made: Gateway) -> int:
    """Tokens of the batch's tenant."""
    sql = "SELECT SUM(prompt_tokens + completion_tokens) FROM gateway_usage WHERE tenant = 'batch'"
    with made.database() as database:
        row = database.run_now(lambda t: t.one(sql))
    return int(row[0] or 0) if row is not None else 0
