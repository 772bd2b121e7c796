from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dynamo_vllm.job import Job, Output, SamplingSpec
from dynamo_vllm.serving.usage.meter import Count, Meter
from dynamo_vllm.serving.usage.record import METADATA, UsageRecord


class Kept(list[UsageRecord]):
    def add(self, record: UsageRecord) -> None:
        self.append(record)


def context(metadata: str | None = "request key ledger") -> Any:
    found = {} if metadata is None else {METADATA: metadata}
    return SimpleNamespace(metadata=found, id=lambda: "part")


def watch(**state: bool) -> Any:
    return SimpleNamespace(**{"must_move": False, "client_left": False, **state})


def job(prompt: int = 5) -> Job:
    return Job("j", [7] * prompt, SamplingSpec(max_tokens=10))


def begun(meter: Meter) -> Count:
    count = meter.begin(context(), object(), job())
    assert count is not None
    return count


def test_the_record_comes_before_the_last_token() -> None:
    kept, got = Kept(), list[int]()
    assert Meter(kept, "m").begin(context(None), object(), job()) is None, "a request of no gateway"
    count = begun(Meter(kept, "m"))
    out = count.around(lambda _: got.append(len(kept)))
    out(Output([1, 2], cached_tokens=4))
    out(Output([3], finish="stop", finished=True))
    count.end(watch())
    assert got == [0, 1]
    (record,) = kept
    assert (record.prompt_tokens, record.cached_tokens, record.completion_tokens) == (5, 4, 3)
    assert (record.request_id, record.key_id, record.ledger_id) == ("request", "key", "ledger")
    assert (record.part, record.model, record.outcome) == ("part", "m", "finished")


@pytest.mark.parametrize(
    ("state", "outcome"), [({"must_move": True}, "moved"), ({"client_left": True}, "aborted"), ({}, "failed")]
)
def test_an_answer_that_ends_early_is_recorded(state: dict[str, bool], outcome: str) -> None:
    kept = Kept()
    count = begun(Meter(kept, "m"))
    count.around(lambda _: None)(Output([1, 2]))
    count.end(watch(**state))
    count.end(watch(**state))
    assert [(one.outcome, one.completion_tokens) for one in kept] == [(outcome, 2)]


def test_a_prefill_worker_records_only_prompts_whose_client_left() -> None:
    kept = Kept()
    meter = Meter(kept, "m", only_prompts=True)
    for state in ({}, {"client_left": True}):
        count = begun(meter)
        count.around(lambda _: None)(Output([1]))
        count.end(watch(**state))
    assert [(one.outcome, one.prompt_tokens, one.completion_tokens) for one in kept] == [("aborted", 5, 0)]
