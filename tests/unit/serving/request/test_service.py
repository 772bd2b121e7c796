"""The request loop over the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from dynamo.llm import HttpError
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument, StreamIncomplete

from dynamo_vllm.errors import Draining, EngineDead, EngineRequestFailed, InvalidRequest, Overloaded
from dynamo_vllm.job import Adapter, EngineFacts, Job, Output
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.serving.request.boundary import boundary
from dynamo_vllm.serving.request.crash_notes import CrashNotes
from dynamo_vllm.serving.request.egress import Egress
from dynamo_vllm.serving.request.outlet import outlet
from dynamo_vllm.serving.request.pace import Gathering, Pace
from dynamo_vllm.serving.request.service import answering_probes
from dynamo_vllm.wire import GenerateRequest, prompt_mark
from harness.fakes import FakeContext, FakeSender, make_worker, request


async def test_sends_deltas_and_usage_in_the_last_chunk() -> None:
    worker = await make_worker()
    sender = await worker.generate(request(max_tokens=3))
    assert [len(chunk["token_ids"]) for chunk in sender.chunks] == [1, 1, 1]
    assert [chunk.get("finish_reason") for chunk in sender.chunks] == [None, None, "length"]
    assert sender.chunks[-1]["completion_usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert sender.closed
    assert len(worker.in_flight) == 0


async def test_moved_request_counts_its_first_prompt_only() -> None:
    """What the frontend does: the mark of the first chunk comes back as the migration link."""
    worker = await make_worker()
    whole = await worker.generate(request([5, 6], max_tokens=10))
    moved = request([5, 6, *whole.tokens[:4]], max_tokens=6)
    assert (await worker.generate(moved)).tokens == whole.tokens[4:], "it goes on where it was"
    moved["migration_link"] = whole.chunks[0]["worker_trace_link"]
    rest = await worker.generate(moved)
    assert rest.chunks[-1]["completion_usage"]["prompt_tokens"] == 2
    assert rest.chunks[0]["worker_trace_link"] == whole.chunks[0]["worker_trace_link"], "it may move again"
    assert sum("worker_trace_link" in chunk for chunk in whole.chunks) == 1


async def test_somebody_elses_link_changes_nothing() -> None:
    worker = await make_worker()
    links = [
        {"trace_id": "0" * 32, "span_id": "1" * 16},
        {"trace_id": prompt_mark(1)["trace_id"], "span_id": "zz"},
    ]
    for link in links:
        sender = await worker.generate({**request([5, 6, 7]), "migration_link": link})
        assert sender.chunks[-1]["completion_usage"]["prompt_tokens"] == 3


async def test_moved_request_owes_only_the_rest_of_min_tokens() -> None:
    worker = await make_worker()
    role = Aggregated(worker.facts)
    raw = {**request([5, 6, 7, 8, 9], max_tokens=6), "migration_link": prompt_mark(2)}
    raw["stop_conditions"]["min_tokens"] = 5
    job = await role.prepare(role.parse(raw), "j")
    assert job.sampling.min_tokens == 2


async def test_cancel_before_first_token_aborts_once() -> None:
    worker = await make_worker(stall_on_token=5)
    context = FakeContext()
    running = asyncio.create_task(worker.generate(request([5]), context))
    while not worker.engine.running:
        await asyncio.sleep(0)
    context.stop()
    sender = await running
    assert worker.engine.aborted == ["r1"]
    assert sender.chunks == []
    assert len(worker.in_flight) == 0


async def test_cancel_in_mid_stream_stops_sending() -> None:
    worker = await make_worker(token_ms=1)
    context = FakeContext()
    running, sender = await worker.begin(context=context)
    context.stop()
    await running
    assert worker.engine.aborted == ["r1"]
    assert "finish_reason" not in sender.chunks[-1]


async def test_closed_stream_aborts_the_job() -> None:
    worker = await make_worker()
    sender = await worker.generate(request(max_tokens=4000), sender=FakeSender(closed_after=2))
    assert worker.engine.aborted == ["r1"]
    assert len(sender.chunks) == 2


async def test_stopped_before_the_engine_saw_it() -> None:
    worker = await make_worker()
    context = FakeContext()
    context.stop()
    sender = await worker.generate(request(), context)
    assert sender.chunks == [] and worker.engine.outputs_seen() == {0: 0}


async def test_drain_moves_a_running_request() -> None:
    worker = await make_worker(token_ms=1)
    running, sender = await worker.begin()
    worker.in_flight.abort_all()
    with pytest.raises(StreamIncomplete):
        await running
    assert all("finish_reason" not in chunk for chunk in sender.chunks)


class Fetching(Aggregated):
    """As with media that are slow to come."""

    def __init__(self, facts: EngineFacts) -> None:
        super().__init__(facts)
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()

    async def prepare(self, request: GenerateRequest, job_id: str, adapter: Adapter | None = None) -> Job:
        self.began.set()
        try:
            await self.goes_on.wait()
        finally:
            await asyncio.sleep(0)  # there is something to clear away
        return await super().prepare(request, job_id, adapter)


@pytest.mark.parametrize("comes", [False, True], ids=["fetching", "fetched"])
async def test_drain_moves_a_request_that_the_engine_does_not_know_yet(comes: bool) -> None:
    worker = await make_worker()
    role = Fetching(worker.facts)
    worker.serve(role)
    running = asyncio.create_task(worker.generate(request(max_tokens=4000)))
    await role.began.wait()
    if comes:
        role.goes_on.set()
    worker.in_flight.abort_all()
    with pytest.raises(StreamIncomplete, match="is leaving"):
        await asyncio.wait_for(running, 30)
    assert worker.engine.outputs_seen() == {0: 0} and len(worker.in_flight) == 0


async def test_drain_while_a_request_is_cleared_away() -> None:
    worker = await make_worker()
    role, context = Fetching(worker.facts), FakeContext()
    worker.serve(role)
    running = asyncio.create_task(worker.generate(request(), context))
    await role.began.wait()
    context.stop()
    while not running.done():
        worker.in_flight.abort_all()
        await asyncio.sleep(0)
    await asyncio.gather(running, return_exceptions=True)
    assert len(worker.in_flight) == 0


async def test_drain_moves_a_job_that_begins_after_its_abort() -> None:
    worker = await make_worker()
    with worker.in_flight.watch(FakeContext()) as watch:
        stream = Egress().stream(FakeSender().send, watch.left)
        send = outlet(lambda output: {}, stream, watch, CrashNotes(None).waiting("r1"), Gathering(Pace()))
        worker.in_flight.abort_all()
        with pytest.raises(Draining):
            send(Output([1], 0))


async def test_dead_engine_ends_the_worker_and_moves_the_request() -> None:
    worker = await make_worker(die_after=2)
    with pytest.raises(EngineShutdown):
        await worker.generate(request(max_tokens=10))
    assert len(worker.deaths) == 1


async def test_engine_failure_of_one_request_is_a_500() -> None:
    worker = await make_worker(fail_on_token=9)
    with pytest.raises(HttpError) as caught:
        await worker.generate(request([9]))
    assert (caught.value.code, worker.deaths) == (500, [])
    assert (await worker.generate(request())).closed


async def test_refusal_names_the_field() -> None:
    worker = await make_worker()
    refusals: list[tuple[dict[str, Any], str]] = [
        (request(temperature=-1.0), "temperature"),
        ({"token_ids": "abc"}, "token_ids"),
        ({**request(), "routing": {"dp_rank": 3}}, "dp_rank: 3 is unknown"),
        (request([5000]), "prompt: 5000 is not in the vocabulary"),
        ({**request(), "multi_modal_data": {"image_url": [{"Url": "data:,"}]}}, "this model takes text only"),
    ]
    for raw, match in refusals:
        with pytest.raises(InvalidArgument, match=match):
            await worker.generate(raw)
    with pytest.raises(HttpError) as caught:
        await worker.generate({**request(), "routing": {"lora_name": "sql"}})
    assert caught.value.code == 404, "an adapter that is not here is an unknown model"
    assert worker.engine.outputs_seen() == {0: 0}


async def test_unexpected_error_is_a_500_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    worker = await make_worker()
    worker.service._role = None  # type: ignore[assignment]  # anything that should never happen
    with pytest.raises(HttpError) as caught:
        await worker.generate(request())
    assert caught.value.code == 500
    assert "AttributeError" not in str(caught.value)


async def test_same_id_twice_at_once_are_two_jobs() -> None:
    """Without an id of its own the abort of the first would end the second."""
    worker = await make_worker(token_ms=1)
    alone = await worker.generate(request([8], max_tokens=60))
    leaving = FakeContext("same")
    first, _ = await worker.begin([5], context=leaving)
    second, _ = await worker.begin([8], 60, FakeContext("same"))
    leaving.stop()
    assert (await second).tokens == alone.tokens and len(alone.tokens) == 60
    await first


async def test_two_choices_count_together() -> None:
    worker = await make_worker()
    sender = await worker.generate(request(n=2, max_tokens=2))
    assert [chunk["index"] for chunk in sender.chunks] == [0, 0, 1, 1]
    assert sender.chunks[-1]["completion_usage"]["completion_tokens"] == 4
    assert sum("completion_usage" in chunk for chunk in sender.chunks) == 1


async def test_an_urgent_request_is_early_in_vllms_order() -> None:
    """A client's higher priority is vLLM's smaller number."""
    role = Aggregated((await make_worker()).facts)
    jobs = [
        await role.prepare(role.parse({**request(), "routing": {"priority": hint}}), "j")
        for hint in (None, 1, 9)
    ]
    assert [job.priority for job in jobs] == [0, -1, -9]


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (EngineRequestFailed("it failed"), ["it failed"]),
        (EngineDead("it is gone"), ["it is gone"]),
        (KeyError("of the prompt"), ["unexpected KeyError, see the log"]),
        (InvalidRequest("bad"), []),
        (Draining("going"), []),
        (Overloaded("its turn did not come"), []),
    ],
)
def test_operator_hears_of_errors_that_are_ours(raised: Exception, told: list[str]) -> None:
    heard: list[str] = []
    with pytest.raises(Exception), boundary("r", lambda dead: None, heard.append):  # noqa: B017
        raise raised
    assert heard == told


@pytest.mark.parametrize(("has_left", "raised"), [(True, asyncio.CancelledError), (False, StreamIncomplete)])
def test_request_moves_if_it_is_cancelled_while_its_client_waits(
    has_left: bool, raised: type[BaseException]
) -> None:
    """As by a second signal: the frontend would tell the client that the request was cancelled."""
    with pytest.raises(raised), boundary("r", lambda dead: None, has_left=lambda: has_left):
        raise asyncio.CancelledError


def test_request_that_waited_too_long_is_a_503_and_does_not_move() -> None:
    """A move would keep the frontend's other requests away from this worker."""
    with pytest.raises(HttpError) as caught, boundary("r", lambda dead: None):
        raise Overloaded("its turn did not come")
    assert caught.value.code == 503


async def test_probe_of_an_engine_that_hangs_takes_too_long() -> None:
    """It is cancelled as a request is whose worker ends; but this worker stays."""

    async def generate(request: object, context: Any, sender: object) -> AsyncIterator[dict[str, Any]]:
        with boundary("probe", lambda dead: None, has_left=lambda: False):
            await asyncio.Event().wait()
        yield {}

    probed: Any = answering_probes(generate, 0.01)
    with pytest.raises(TimeoutError):
        async for _ in probed({}, FakeContext()):
            pass
