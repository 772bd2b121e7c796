"""The prefill and decode roles over the fake engine."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.job import Adapter, Job
from dynamo_vllm.kv.connectors import CONNECTORS
from dynamo_vllm.kv.connectors.base import LEFT_TO_DECODE
from dynamo_vllm.roles.decode import Decode
from dynamo_vllm.roles.prefill import Prefill
from dynamo_vllm.serving.request.cancel import InFlight
from dynamo_vllm.serving.request.service import Service
from harness.fakes import FakeContext, FakeSender, outputs, request

NIXL = CONNECTORS["nixl"]


async def engine() -> FakeEngine:
    return FakeEngine(FakeSpec(), lambda figures: None)


async def prefilled(raw: dict[str, Any], adapter: Adapter | None = None, local: int = 0) -> dict[str, Any]:
    """The chunk of a prefill worker."""
    made = await engine()
    role = Prefill(made.facts, NIXL, local_prefill_tokens=local)
    parsed = role.parse(raw)
    job = await role.prepare(parsed, "p", adapter)
    encoder = role.encoder(parsed, job)
    (chunk,) = map(encoder.encode, [job.answer] if job.answer else await outputs(made, job))
    return chunk


def handed_over(raw: dict[str, Any], handed: object) -> dict[str, Any]:
    return {**raw, "prefill_result": {"disaggregated_params": handed}}


async def decode_job(raw: dict[str, Any], handed: object, adapter: Adapter | None = None) -> tuple[Job, int]:
    """What a decode worker makes of it, and how many caches it counts as lost."""
    lost: list[int] = []
    role = Decode((await engine()).facts, NIXL, lambda: lost.append(1))
    return await role.prepare(role.parse(handed_over(raw, handed)), "d", adapter), len(lost)


async def decoded(raw: dict[str, Any], lost: list[int], comes: bool = True) -> list[dict[str, Any]]:
    made = await engine()
    role = Decode(made.facts, NIXL, lambda: lost.append(1))
    parsed = role.parse(raw)
    job = await role.prepare(parsed, "d")
    encoder = role.encoder(parsed, job)
    answer = await outputs(made, job)
    for output in answer if not comes else ():
        output.cached_tokens = 0 if output.finished else None
    return list(map(encoder.encode, answer))


async def test_prefill_makes_one_token_and_says_where_the_cache_is() -> None:
    asked = request(max_tokens=50, guided_decoding={"regex": "a"})
    asked["output_options"] = {"logprobs": 3}
    chunk = await prefilled(asked)
    assert len(chunk["token_ids"]) == 1
    assert chunk["disaggregated_params"]["kv_transfer_params"]["do_remote_prefill"] is True


async def test_decode_goes_on_from_there() -> None:
    lost: list[int] = []
    handed = (await prefilled(request([5, 6, 7])))["disaggregated_params"]
    chunks = await decoded(handed_over(request([5, 6, 7]), {**handed, "cached_tokens": 1}), lost)
    assert chunks[-1]["completion_usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert chunks[-1]["engine_data"] == {"decode_cached_tokens": 2}
    assert lost == []


async def test_engine_counts_what_came_and_not_what_the_prefill_engine_had() -> None:
    """vLLM 0.31 adds that figure to the parameters, and would answer with it."""
    handed = (await prefilled(request([5, 6, 7])))["disaggregated_params"]
    handed["kv_transfer_params"]["remote_prefill_cached_tokens"] = 0
    job, _ = await decode_job(request([5, 6, 7]), handed)
    assert job.transfer is not None and "remote_prefill_cached_tokens" not in job.transfer


@pytest.mark.parametrize("handed", [None, "x", {}, {"kv_transfer_params": {"do_remote_prefill": True}}])
async def test_decode_computes_what_was_not_handed_over_rightly(
    handed: object, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[int] = []
    chunks = await decoded(handed_over(request([5, 6, 7]), handed), lost)
    alone = await decoded(request([5, 6, 7]), [])
    assert [c["token_ids"] for c in chunks] == [c["token_ids"] for c in alone]
    assert lost == [1]
    told = [record.args for record in caplog.records if isinstance(record.args, tuple) and record.args]
    assert [args[0] for args in told] == ["d"], "once, with the request's id"


@pytest.mark.parametrize(
    ("there", "here", "is_fetched"),
    [("old", "old", True), ("old", "new", False), ("old", None, False), (None, "new", False)],
)
async def test_a_cache_of_other_content_of_an_adapter_is_not_fetched(
    there: str | None, here: str | None, is_fetched: bool
) -> None:
    def adapter(content: str | None) -> Adapter | None:
        return Adapter("sql", 1, "/sql", "sql", content) if content else None

    handed = (await prefilled(request([5, 6, 7]), adapter(there)))["disaggregated_params"]
    job, lost = await decode_job(request([5, 6, 7]), handed, adapter(here))
    assert (job.transfer is not None, lost == 0) == (is_fetched, is_fetched)


async def test_decode_without_a_prefill_worker_loses_nothing() -> None:
    lost: list[int] = []
    chunks = await decoded(request(max_tokens=3), lost)
    assert len(chunks) == 3 and lost == []


async def test_what_cannot_be_handed_over_is_computed_by_decode_alone() -> None:
    """Each choice would fetch the cache, and it is given away once.

    A fetched cache has no logprobs of its prompt: the engine would tell of memory that nobody wrote.
    """
    handed = (await prefilled(request()))["disaggregated_params"]
    for asked in (request(n=2), {**request(), "output_options": {"prompt_logprobs": 1}}):
        assert (await decode_job(asked, handed))[0].transfer is None
        assert (await prefilled(asked))["disaggregated_params"] == LEFT_TO_DECODE


async def test_health_check_of_a_prefill_worker_asks_the_engine_and_keeps_no_blocks() -> None:
    role = Prefill((await engine()).facts, NIXL, local_prefill_tokens=8)
    job = await role.prepare(role.parse(role.health_check()), "canary")
    assert (job.transfer, job.answer) == (None, None)


async def test_a_cache_that_did_not_come_is_counted() -> None:
    lost: list[int] = []
    handed = (await prefilled(request([5, 6, 7])))["disaggregated_params"]
    handed["kv_transfer_params"]["remote_num_tokens"] = 3
    await decoded(handed_over(request([5, 6, 7]), handed), lost, comes=False)
    assert lost == [1]


@pytest.mark.parametrize(("length", "is_left"), [(3, True), (7, True), (8, False)])
async def test_short_prompt_is_left_to_the_decode_worker(length: int, is_left: bool) -> None:
    raw = request(list(range(20, 20 + length)))
    chunk = await prefilled(raw, local=8)
    assert (chunk["disaggregated_params"] == LEFT_TO_DECODE) is is_left
    assert len(chunk["token_ids"]) == 1 and chunk["finish_reason"] == "length"
    lost: list[int] = []
    chunks = await decoded(handed_over(raw, chunk["disaggregated_params"]), lost)
    assert [c["token_ids"] for c in chunks] == [c["token_ids"] for c in await decoded(raw, [])]
    assert lost == [], "what was to be transferred came"


async def test_prompt_for_an_adapter_that_is_not_here_is_left_to_the_decode_worker() -> None:
    """The frontend sends it to any prefill worker."""
    made = await engine()
    role, sender = Prefill(made.facts, NIXL), FakeSender()
    service = Service(role, made, InFlight(made), lambda dead: None)
    asked = {**request(), "routing": {"lora_name": "sql"}}
    async for _ in service.generate(asked, FakeContext(), sender):
        raise AssertionError("push egress yields nothing")
    (chunk,) = sender.chunks
    assert chunk["disaggregated_params"] == LEFT_TO_DECODE
    assert sum(made.outputs_seen().values()) == 0
