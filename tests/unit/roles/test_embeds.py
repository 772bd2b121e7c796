"""Requests with prompt embeddings, up to the job an engine gets; reading them is the engine's."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm import wire
from dynamo_vllm.codec.chunks import TokenEncoder
from dynamo_vllm.engine.fake.parts import FakeRenderer
from dynamo_vllm.engine.fake.spec import FakeSpec, facts_of
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import Embeds, EngineFacts, Output
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.text import AggregatedText
from harness.fakes import request


class Reader:
    """Takes a number for a tensor of so many rows."""

    async def read(self, text: str) -> Embeds:
        return Embeds(int(text), text)

    def smallest(self) -> str:
        return "1"


def facts() -> EngineFacts:
    return facts_of(FakeSpec())


def embedded(rows: int, answered: int = 0, **more: Any) -> dict[str, Any]:
    """As the frontend sends it; after a move the answer so far stands in the token ids."""
    made = {**request(), "token_ids": [7] * answered, "prompt_embeds": str(rows), **more}
    return {**made, "migration_link": wire.prompt_mark(rows)} if answered else made


@pytest.mark.parametrize(("answered", "min_tokens"), [(0, 5), (4, 1)])
async def test_job_has_the_rows_as_placeholders_and_goes_on_behind_them(
    answered: int, min_tokens: int
) -> None:
    """Usage counts rows, also after a move."""
    role = Aggregated(facts(), Reader())
    stop = {"max_tokens": 6, "min_tokens": 5}
    asked = role.parse(embedded(9, answered, stop_conditions=stop))
    job = await role.prepare(asked, "j")
    assert job.embeds == Embeds(9, "9")
    assert list(job.prompt) == [0] * 9 + [7] * answered
    assert job.sampling.min_tokens == min_tokens
    chunk = last_chunk(role.encoder(asked, job))
    assert chunk["completion_usage"]["prompt_tokens"] == 9
    assert chunk["worker_trace_link"] == wire.prompt_mark(9), "it may move, again"


def last_chunk(encoder: TokenEncoder) -> dict[str, Any]:
    return encoder.encode(Output([1], finish="length", finished=True))


async def test_answer_takes_the_room_that_is_left() -> None:
    known = facts()
    role = Aggregated(known, Reader())
    raw = embedded(known.context_length - 3)
    raw["stop_conditions"] = {"max_tokens": 50}
    assert (await role.prepare(role.parse(raw), "j")).sampling.max_tokens == 3
    with pytest.raises(TooLong):
        await role.prepare(role.parse(embedded(known.context_length - 3, answered=3)), "j")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"token_ids": [5, 6]}, "token_ids: cannot be combined with prompt_embeds"),
        ({"output_options": {"prompt_logprobs": 1}}, "prompt_logprobs: not available with prompt_embeds"),
    ],
)
async def test_what_cannot_stand_beside_rows_is_refused(more: dict[str, Any], named: str) -> None:
    role = Aggregated(facts(), Reader())
    with pytest.raises(InvalidRequest) as refused:
        await role.prepare(role.parse({**embedded(9), **more}), "j")
    assert str(refused.value).startswith(named)


async def test_engine_that_takes_none_and_text_mode_refuse() -> None:
    role = Aggregated(facts())
    with pytest.raises(InvalidRequest, match="prompt_embeds: this worker was started without"):
        await role.prepare(role.parse(embedded(9)), "j")
    text = AggregatedText(facts(), FakeRenderer(1000), "m")
    with pytest.raises(InvalidRequest, match="prompt_embeds: text mode takes text only"):
        await text.prepare(text.parse({"prompt": "a", "prompt_embeds": "x"}), "j")
