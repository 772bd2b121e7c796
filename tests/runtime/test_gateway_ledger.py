"""The ledger holds what clients were told they used: through aborts, kills and moves to other workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from harness import gateway as gateways
from harness import metered_load
from harness.gateway import Gateway
from harness.metered_load import Told
from harness.waiting import until

SUMS = "SUM(requests), SUM(prompt_tokens), SUM(completion_tokens)"
ENGINE = ("--engine", "fake", "--fake-engine", '{"token_ms": 3}')


@pytest.mark.parametrize(
    "count",
    [300, pytest.param(int(os.environ.get("DYNAMO_VLLM_REQUESTS", "10000")), marks=pytest.mark.long)],
)
@pytest.mark.timeout(900)
def test_ledger_equals_what_clients_were_told(tmp_path: Path, count: int) -> None:
    with gateways.gateway(tmp_path, *ENGINE, "--workers", "3") as made:
        secrets = [made.key, made.create_key("one", "--tenant", "a"), made.create_key("two", "--tenant", "b")]
        secrets.append(made.create_key("limited", "--tenant", "b", "--tokens-per-day", "100000000"))
        victims = iter(made.workers)
        events = {
            count // 5: lambda: kill(next(victims)),
            2 * count // 5: lambda: kill(made.control),
            3 * count // 5: lambda: next(victims).send_signal(signal.SIGTERM),
            7 * count // 10: lambda: kill(made.envoy),
            4 * count // 5: lambda: kill(next(victims)),
        }
        told = asyncio.run(metered_load.send(made.url, secrets, count, at=events))
        print(dict(told.outcomes))
        assert told.done == count and not any(name.endswith(" 500") for name in told.outcomes)
        assert len(told.usage) > count // 2
        until("all records", lambda: not missing(made, told), 60, every=0.5)
        compare(made, told)


def kill(process: psutil.Process) -> None:
    process.send_signal(signal.SIGKILL)


def parts(made: Gateway) -> dict[str, tuple[int, int]]:
    """Prompt and completion tokens of each request in the ledger."""
    sql = (
        "SELECT request_id, SUM(prompt_tokens), SUM(total_tokens - prompt_tokens) "
        "FROM gateway_usage_parts GROUP BY request_id"
    )
    with made.database() as database:
        return {row[0]: (int(row[1]), int(row[2])) for row in database.run_now(lambda t: t.all(sql))}


def missing(made: Gateway, told: Told) -> set[str]:
    return set(told.usage) - set(parts(made))


def compare(made: Gateway, told: Told) -> None:
    found = parts(made)
    different = {key: (used, found[key]) for key, used in told.usage.items() if found[key] != used}
    assert different == {}
    for request_id, least in told.least.items():
        if request_id in found:  # one that was moved and left at once may be nobody's
            assert found[request_id][1] >= least
    with made.database() as database:
        sums = database.run_now(lambda t: t.one(f"SELECT {SUMS} FROM gateway_usage"))
    assert sums is not None
    assert tuple(map(int, sums)) == (
        len(found),
        sum(prompt for prompt, _ in found.values()),
        sum(completion for _, completion in found.values()),
    )
