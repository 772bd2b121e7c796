"""A worker tries every kind of request before it serves: which, in which role, and what a refusal does."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dynamo_vllm.engine.base import AddAdapter, RemoveAdapter, ResetCache, Sink
from dynamo_vllm.engine.encoder_cache.folder import Folder
from dynamo_vllm.engine.fake.engine import FakeEngine
from dynamo_vllm.engine.fake.spec import FakeSpec
from dynamo_vllm.errors import AdapterRefused, EngineDead, EngineRequestFailed, InvalidRequest
from dynamo_vllm.job import EngineFacts, Job, SamplingSpec
from dynamo_vllm.lora import sample, tensors
from dynamo_vllm.media.loader import make_loader
from dynamo_vllm.models.tiny import make_tiny_model
from dynamo_vllm.roles import trials
from dynamo_vllm.roles.aggregated import Aggregated
from dynamo_vllm.roles.base import Role
from dynamo_vllm.roles.decode import Decode
from dynamo_vllm.roles.encode import Encode
from dynamo_vllm.roles.media import MediaReader
from dynamo_vllm.roles.prefill import Prefill
from dynamo_vllm.roles.text import AggregatedText
from dynamo_vllm.serving.lifecycle import warmup

Matches = Callable[[SamplingSpec], bool]
KINDS: dict[str, Matches] = {
    "greedy": lambda s: s == SamplingSpec(max_tokens=2, temperature=0.0, ignore_eos=True),
    "temperature": lambda s: s.temperature == 0.8 and (s.top_k, s.top_p, s.min_p) == (None, None, None),
    "top-k": lambda s: s.top_k == 5 and s.top_p is None,
    "top-p": lambda s: s.top_p == 0.9 and s.top_k is None,
    "top-k and top-p": lambda s: s.top_k == 5 and s.top_p == 0.9,
    "min-p": lambda s: s.min_p == 0.05,
    "seed": lambda s: s.seed == 1,
    "penalties": lambda s: None not in (s.presence_penalty, s.frequency_penalty, s.repetition_penalty),
    "several choices": lambda s: s.n == 2,
    "logit bias": lambda s: bool(s.logit_bias),
    "min_tokens": lambda s: s.min_tokens == 2 and bool(s.stop_token_ids),
    "logprobs 1": lambda s: s.logprobs == 1,
    "logprobs 20": lambda s: s.logprobs == 20,
    "prompt_logprobs": lambda s: s.prompt_logprobs == 1,
    "guided json": lambda s: s.guide is not None and s.guide.json is not None,
    "guided regex": lambda s: s.guide is not None and s.guide.regex is not None,
    "guided choice": lambda s: s.guide is not None and s.guide.choice is not None,
    "guided grammar": lambda s: s.guide is not None and s.guide.grammar is not None,
}
NOT_OF_PREFILL = ("several choices", "logprobs 1", "logprobs 20", "prompt_logprobs", "guided")
"""The decode worker computes them."""
PICTURE = {"image": 1}


class Recorder(FakeEngine):
    """Keeps every job, and refuses some."""

    def __init__(self, refuses: Callable[[Job], Exception | None] = lambda job: None, **spec: Any) -> None:
        super().__init__(FakeSpec(builds_lazily=True, **spec), lambda figures: None)
        self.jobs: list[Job] = []
        self.most_at_once = 0
        self.refuses = refuses

    async def stream(self, job: Job, sink: Sink) -> None:
        self.jobs.append(job)
        if (refusal := self.refuses(job)) is not None:
            raise refusal
        self.most_at_once = max(self.most_at_once, len(self.running) + 1)
        await super().stream(job, sink)


@asynccontextmanager
async def warming(
    engine: Recorder, make: Callable[..., Role[Any]] | None = None, **more: Any
) -> AsyncIterator[warmup.Warming]:
    loader = make_loader(threads=1)
    facts = engine.facts
    reader = MediaReader(facts, loader, engine.parts.media)
    role = make(facts, engine, reader) if make is not None else Aggregated(facts, None, reader)
    try:
        yield warmup.Warming(engine, engine, role, lambda phase: None, **more)
    finally:
        await loader.aclose()


async def warmed(engine: Recorder, make: Callable[..., Role[Any]] | None = None, **more: Any) -> list[Job]:
    async with warming(engine, make, **more) as made:
        await warmup.warm_up(made)
    return engine.jobs


def decode(facts: EngineFacts, engine: Recorder, reader: MediaReader) -> Role[Any]:
    return Decode(facts, None, lambda: None, None, reader)


def prefill(facts: EngineFacts, engine: Recorder, reader: MediaReader) -> Role[Any]:
    return Prefill(facts, None, 100, None, reader)


def text(facts: EngineFacts, engine: Recorder, reader: MediaReader) -> Role[Any]:
    assert engine.parts.renderer is not None
    return AggregatedText(facts, engine.parts.renderer, ["m"], media_reader=reader)


def is_tried(kind: str, jobs: Sequence[Job]) -> bool:
    return any(KINDS[kind](job.sampling) for job in jobs)


def untried(jobs: Sequence[Job]) -> list[str]:
    return [kind for kind in KINDS if not is_tried(kind, jobs)]


@pytest.mark.parametrize(("make", "ranks"), [(None, 1), (decode, 1), (None, 2)])
async def test_every_rank_gets_every_kind_where_tokens_are_asked_for(
    make: Callable[..., Role[Any]] | None, ranks: int
) -> None:
    jobs = await warmed(Recorder(ranks=ranks), make)
    assert {job.data_parallel_rank or 0 for job in jobs} == set(range(ranks))
    for rank in range(ranks):
        assert untried([job for job in jobs if (job.data_parallel_rank or 0) == rank]) == []


async def test_prefill_worker_makes_one_token_and_keeps_no_blocks() -> None:
    jobs = await warmed(Recorder(), prefill)
    assert {(job.sampling.max_tokens, job.transfer) for job in jobs} == {(1, None)}
    assert all(kind.startswith((*NOT_OF_PREFILL, "greedy", "min_tokens")) for kind in untried(jobs))


async def test_every_kind_is_tried_in_text_mode_and_chats_too() -> None:
    jobs = await warmed(Recorder(), text)
    assert untried(jobs) == ["greedy", "prompt_logprobs"]
    assert all(job.sampling.detokenize for job in jobs)
    assert any(job.sampling.stop for job in jobs)
    facts = Recorder().facts
    asked = [trial.request for trial in trials.of_text(facts, trials.TrialInputs("s")).short]
    assert any("messages" in body for body in asked) and any("tools" in body for body in asked)


async def test_each_kind_is_tried_alone_and_all_together() -> None:
    engine = Recorder()
    jobs = await warmed(engine)
    assert sum(job.sampling.seed == 1 for job in jobs) == 2
    assert engine.most_at_once >= len(KINDS) - 1


async def test_slow_engine_gets_them_together_only_and_no_long_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(warmup, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(warmup, "LONGER_SECONDS", 0.0)
    jobs = await warmed(Recorder())
    assert sum(job.sampling.seed == 1 for job in jobs) == 1
    assert max(len(job.prompt) for job in jobs) == trials.SHORT


class Timed(Recorder):
    """Takes a steady time for each token, and once more for what it builds with the first of a length."""

    def __init__(self, seconds_per_token: float, **spec: Any) -> None:
        super().__init__(**spec)
        self.now = 0.0
        self.monotonic = lambda: self.now
        self._seconds = seconds_per_token
        self._built: set[int] = set()

    async def stream(self, job: Job, sink: Sink) -> None:
        length = len(job.prompt)
        self.now += (length + 1) * self._seconds + (0 if length in self._built else 60)
        self._built.add(length)
        await super().stream(job, sink)


@pytest.mark.parametrize("seconds_per_token", [1e-5, 1e-3, 0.1])
async def test_speed_is_that_of_a_longer_prompt_when_all_is_built(
    seconds_per_token: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Timed(seconds_per_token)
    monkeypatch.setattr(warmup, "time", engine)
    async with warming(engine) as made:
        speed = await warmup.warm_up(made)
    assert speed is not None
    assert 0.8 < speed * seconds_per_token < 2.1


async def test_speed_of_ranks_is_that_of_the_slowest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Recorder(ranks=2)

    async def speed(self: object, longest: object, rank: int, seconds: float) -> float:
        return 300.0 - 100 * rank

    monkeypatch.setattr(warmup._Run, "_speed", speed)
    async with warming(engine) as made:
        assert await warmup.warm_up(made) == 200.0


async def test_prompts_grow_until_one_step_cannot_take_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LONGER_SECONDS", 1e9)
    jobs = await warmed(Recorder(context_length=1000))
    assert [len(job.prompt) for job in jobs if len(job.prompt) > trials.SHORT] == [96, 384, 998, 998]
    assert len({job.cache_salt for job in jobs if len(job.prompt) > trials.SHORT}) == 4
    facts = EngineFacts(
        context_length=9999,
        vocab_size=9,
        block_size=16,
        total_kv_blocks=9,
        max_num_seqs=9,
        max_num_batched_tokens=1536,
    )
    assert list(trials.lengths(facts)) == [96, 384, 1536, 1600]


async def test_nobody_finds_these_prompts_cached() -> None:
    jobs = await warmed(engine := Recorder())
    assert all((job.cache_salt or "").startswith("warm-up ") for job in jobs)
    assert engine.operations == [ResetCache(frozenset({"prefix"}), with_tiers=False)]
    assert {job.cache_salt for job in jobs}.isdisjoint({job.cache_salt for job in await warmed(Recorder())})


# --- media and adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [None, decode, prefill, text])
async def test_picture_is_tried_where_media_are_taken(make: Callable[..., Role[Any]] | None) -> None:
    engine = Recorder(media=PICTURE)
    jobs = await warmed(engine, make, takes_media=True)
    assert sum(job.media is not None for job in jobs) == 2, "alone and together"
    assert engine.operations == [ResetCache(frozenset({"prefix", "multimodal", "encoder"}), with_tiers=False)]
    assert not any(job.media for job in await warmed(Recorder(media=PICTURE), make)), "where none are taken"


async def test_sound_is_tried_and_a_video_is_not() -> None:
    engine = Recorder(media={"audio": 1, "video": 1})
    async with warming(engine, takes_media=True) as made:
        given = warmup._Run(made)._given()
    assert [medium.kind for medium in given.media] == ["audio"]


async def test_encode_worker_encodes_a_picture_at_each_start(tmp_path: Path) -> None:
    """One that is in the folder already is not encoded again."""

    def encode(facts: EngineFacts, engine: Recorder, reader: MediaReader) -> Role[Any]:
        return Encode(facts, reader, Folder(tmp_path, 10**6))

    for _ in range(2):
        engine = Recorder(media=PICTURE)
        await warmed(engine, encode, takes_media=True)
        (seen, _) = [job for job in engine.jobs if job.media is not None]
        assert seen.prompt[-1:] == [1]


async def test_adapter_is_tried_where_lora_is_on_and_gone_afterwards(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    engine = Recorder(adapters=2)
    jobs = await warmed(engine, adapter_base=base, scratch=tmp_path)
    assert sum(job.adapter is not None for job in jobs) == 2, "alone and together"
    kinds = [type(op) for op in engine.operations]
    assert kinds == [AddAdapter, RemoveAdapter, ResetCache]
    assert engine.adapters == {}


async def test_no_adapter_is_tried_where_lora_is_off_or_the_models_modules_are_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for adapters in (0, 1):
        assert caplog.text == ""
        jobs = await warmed(Recorder(adapters=adapters), adapter_base=tmp_path, scratch=tmp_path)
        assert not any(job.adapter for job in jobs) and is_tried("guided json", jobs)
    assert "warm-up: skipped requests with an adapter" in caplog.text


def test_sample_adapter_fits_its_base_model(tmp_path: Path) -> None:
    base = make_tiny_model(tmp_path / "base")
    made = sample.write(tmp_path / "sample", base, max_rank=4)
    settings = json.loads((made / "adapter_config.json").read_text())
    assert (settings["r"], settings["target_modules"]) == (4, ["q_proj", "v_proj"])
    held = tensors.read_header(made / "adapter_model.safetensors")
    weights = tensors.read_header(base / "model.safetensors")
    whole = weights["model.layers.0.self_attn.q_proj.weight"].shape
    a, b = (held[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{m}.weight"].shape for m in "AB")
    assert (a, b) == ((4, whole[1]), (whole[0], 4))
    with pytest.raises(AdapterRefused, match="no sample can be made"):
        sample.write(tmp_path / "other", tmp_path / "nowhere", max_rank=4)


# --- what goes wrong --------------------------------------------------------------------------------------


def guided(job: Job) -> bool:
    return job.sampling.guide is not None and job.sampling.guide.regex is not None


async def test_refused_kind_is_a_warning_told_once_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Recorder(lambda job: EngineRequestFailed("no such thing") if guided(job) else None, ranks=2)
    with caplog.at_level(logging.WARNING):
        jobs = await warmed(engine)
        await warmed(Recorder(lambda job: InvalidRequest("refused to clients too") if guided(job) else None))
    assert [r.getMessage() for r in caplog.records] == [
        "warm-up: skipped requests of the kind guided regex: no such thing"
    ]
    assert is_tried("guided grammar", jobs), "which comes after it"
    assert sum(guided(job) for job in jobs) == 2, "once for each rank, and not once more together"


async def test_short_context_has_room_for_every_kind() -> None:
    jobs = await warmed(Recorder(context_length=8))
    assert max(len(job.prompt) for job in jobs) == 6 and is_tried("guided json", jobs)


async def test_engine_that_dies_ends_the_start_and_names_the_kind() -> None:
    engine = Recorder(lambda job: EngineDead("gone") if guided(job) else None)
    with pytest.raises(EngineDead, match=r"gone \(in the warm-up, at guided regex; --no-warm-up"):
        await warmed(engine)


async def test_refused_plain_request_ends_the_start() -> None:
    with pytest.raises(EngineRequestFailed, match="nothing works"):
        await warmed(Recorder(lambda job: EngineRequestFailed("nothing works")))


async def test_request_that_does_not_end_is_cut_off_and_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warmup, "ALL_SECONDS", 0.05)
    engine = Recorder(stall_on_token=1)
    jobs = await warmed(engine)
    assert len(jobs) == 1 and not engine.running
    assert "warm-up: stopped after 0 s, at greedy" in caplog.text


async def test_kind_that_takes_long_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "REPORT_SECONDS", 0.0)
    told: list[str] = []
    engine = Recorder(prefill_ms=2)
    async with warming(engine) as made:
        await warmup.warm_up(warmup.Warming(made.engine, engine, made.role, told.append))
    assert "warming: guided json" in told
