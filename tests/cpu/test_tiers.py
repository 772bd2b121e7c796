"""Tests KV caches that leave an engine for host memory: they come back with the same answers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cpu.pairs import ENGINE_DATA, Pairs, not_computed, pairs, prompts
from cpu.slow_copies import CALL, HOLD
from harness.adapters import make_adapter
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from harness.warm import WARMED, Zygote

TOKENS = 1000
"""Not whole blocks: of a prompt of whole blocks vLLM loads the last one from the tier though it has it."""
BLOCK_TOKENS = 32
SMALL = ("--num-gpu-blocks-override", "80", "--block-size", str(BLOCK_TOKENS), "--kv-offload-gb", "0.1")
"""An engine that holds two prompts, before a tier that holds them all."""
LOADED, STORED = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"
EVERY = [[start + token % 700 for token in range(TOKENS)] for start in range(20, 28)]


@pytest.fixture(scope="module")
def keeping(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("keeping")) as made:
        made.start_frontend()
        warm.start_worker(made, model, *SMALL)
        yield made.wait_ready(120)


@pytest.fixture(scope="module")
def pair(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with pairs(
        warm, model, tmp_path_factory.mktemp("pair"), 1, 1, *SMALL, "--connector", "offload", "nixl"
    ) as made:
        yield made


def ask(made: Stack, prompt: list[int], **more: Any) -> Any:
    extra = {"ignore_eos": True, "nvext": ENGINE_DATA}
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": extra, **more}
    return made.openai.completions.create(prompt=prompt, **body)


def texts(made: Stack, every: list[list[int]], **more: Any) -> list[list[str]]:
    return [[choice.text for choice in ask(made, prompt, **more).choices] for prompt in every]


def cached(answer: Any) -> int:
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else int(details.cached_tokens or 0)


def settled(worker: Worker) -> float:
    """Returns the bytes that were stored, when no store is under way."""
    until("an idle engine", lambda: worker.busy() == 0)
    return worker.metric(STORED)


def test_answers_from_the_tier_equal_those_of_another_engine(keeping: Stack, one_worker: Stack) -> None:
    (worker,) = keeping.workers
    cold, before = texts(keeping, EVERY), worker.metric(LOADED)
    found = [ask(keeping, prompt) for prompt in EVERY]
    assert [[answer.choices[0].text] for answer in found] == cold == texts(one_worker, EVERY)
    # The engine has room for two of eight.
    assert all(cached(answer) >= TOKENS - BLOCK_TOKENS for answer in found)
    assert worker.metric(LOADED) > before


def test_logprobs_of_a_prompt_are_computed_though_the_tier_has_it(keeping: Stack, one_worker: Stack) -> None:
    texts(keeping, EVERY)
    body = {"model": "tiny", "prompt": EVERY[0], "max_tokens": 1, "prompt_logprobs": 1, "nvext": ENGINE_DATA}
    found, wanted = (made.post("/v1/completions", body).json() for made in (keeping, one_worker))
    told = [answer["nvext"]["engine_data"]["prompt_logprobs"] for answer in (found, wanted)]
    assert len(told[0]) == TOKENS and told[0] == told[1]


def test_cleared_cache_is_cleared_in_the_tier_too(keeping: Stack) -> None:
    (worker,) = keeping.workers
    before = texts(keeping, EVERY[:4])
    for verb in ("clear_kv_blocks", "reset_caches"):
        settled(worker)
        assert worker.admin(verb).json()["status"] == "success"
        found = [ask(keeping, prompt) for prompt in EVERY[:4]]
        assert [cached(answer) for answer in found] == [0] * 4
        assert [[answer.choices[0].text] for answer in found] == before


def test_refused_clear_leaves_the_tier_as_it_is(keeping: Stack) -> None:
    (worker,) = keeping.workers
    texts(keeping, EVERY)  # the first is now only in the tier
    settled(worker)
    with keeping.openai.completions.with_streaming_response.create(
        model="tiny", prompt=EVERY[7], max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ):
        until("a running request", lambda: worker.busy() == 1)
        refused = worker.admin("clear_kv_blocks").json()
        assert (refused["status"], "in use" in refused["message"]) == ("error", True)
    until("an idle engine", lambda: worker.busy() == 0)
    assert cached(ask(keeping, EVERY[0])) >= TOKENS - BLOCK_TOKENS


def test_tier_that_is_being_filled_can_be_cleared_again_and_again(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    """vLLM itself would refuse the second time, and sleep, until somebody asks something."""
    hold = tmp_path / "hold"
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *SMALL, env={HOLD: str(hold)}, call=CALL)
        made.wait_ready(120)
        hold.touch()
        before = ask(made, EVERY[0])
        for verb in ("clear_kv_blocks", "clear_kv_blocks", "sleep", "wake_up"):
            assert worker.admin(verb).status_code == 200
        hold.unlink()
        made.wait_ready(120)
        after = ask(made, EVERY[0])
        assert (cached(after), after.choices[0].text) == (0, before.choices[0].text)
        assert cached(ask(made, EVERY[0])) > 0


@pytest.mark.parametrize("level", [1, 2])
def test_engine_that_slept_finds_nothing_in_its_tier(keeping: Stack, level: int) -> None:
    (worker,) = keeping.workers
    before = texts(keeping, EVERY[:4])
    assert worker.admin("sleep", level=level).status_code == 200
    assert worker.admin("wake_up").status_code == 200
    keeping.wait_ready(120)
    found = [ask(keeping, prompt) for prompt in EVERY[:4]]
    assert [cached(answer) for answer in found] == [0] * 4
    assert [[answer.choices[0].text] for answer in found] == before


def test_restarted_worker_finds_its_caches_on_disk_unless_they_were_cleared(
    warm: Zygote, model: Path, tmp_path: Path, one_worker: Stack
) -> None:
    """The warm-up of each start forgets its own prompts, and nothing of an earlier run."""
    flags = (*SMALL, "--kv-offload-gb", "0.02", "--kv-offload-disk", f"{tmp_path}/kv:0.2")
    wanted = texts(one_worker, EVERY)
    with stack(tmp_path) as made:
        made.start_frontend()
        for clears, finds in ((False, False), (True, True), (False, False)):
            worker = warm.start_worker(made, model, *flags, env=WARMED)
            made.wait_ready(120)
            assert texts(made, EVERY[:2]) == wanted[:2]
            assert (worker.metric(READ) > 0) is finds
            assert texts(made, EVERY) == wanted
            wait_on_disk(worker)
            if clears:
                assert worker.admin("clear_kv_blocks").status_code == 200
            end(made, worker)


def test_worker_whose_disk_is_lost_starts_and_computes(
    warm: Zygote, model: Path, tmp_path: Path, one_worker: Stack
) -> None:
    wanted = texts(one_worker, EVERY[:2])
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *SMALL, "--kv-offload-disk", "/proc/lost:1")
        made.wait_ready(120)
        assert texts(made, EVERY[:2]) == wanted
        lines = worker.log.read_text().splitlines()
        assert sum("--kv-offload-disk /proc/lost:1" in line for line in lines) == 1
        until("it is paused", lambda: worker.metric("vllm:kv_offload_disk_paused") == 1)


@pytest.mark.more
def test_adapter_replaced_across_a_restart_is_not_answered_from_the_old_ones_disk(
    warm: Zygote, model: Path, tmp_path: Path
) -> None:
    flags = (*SMALL, "--kv-offload-gb", "0.02", "--kv-offload-disk", f"{tmp_path}/kv:0.2", "--lora-enabled")
    folder, answers = tmp_path / "adapter", dict[int, list[list[str]]]()
    with stack(tmp_path) as made:
        made.start_frontend()
        for seed, finds in ((1, False), (3, False), (1, True)):
            make_adapter(folder, model, seed=seed)
            worker = warm.start_worker(made, model, *flags, "--lora-modules", f"a={folder}")
            made.wait_ready(120).wait_listed("a")
            found = texts(made, EVERY, model="a")
            assert found == answers.setdefault(seed, found)
            assert (worker.metric(READ) > 0) is finds
            wait_on_disk(worker)
            end(made, worker)
    assert answers[1] != answers[3]


def wait_on_disk(worker: Worker) -> None:
    whole = len(EVERY) * (TOKENS // BLOCK_TOKENS)
    until("all on disk", lambda: worker.metric("vllm:kv_offload_disk_chunks") >= whole)


def end(made: Stack, worker: Worker) -> None:
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    made.workers.remove(worker)
    until("no worker", lambda: not made.instances())


def test_prefill_and_decode_workers_load_from_their_tiers(pair: Pairs, one_worker: Stack) -> None:
    (prefill,), (decode,) = pair.prefills, pair.decodes
    wanted = texts(one_worker, EVERY)
    assert texts(pair.stack, EVERY) == wanted  # cold
    assert texts(pair.stack, EVERY[-1:]) == wanted[-1:]  # in the engines' own caches
    assert prefill.metric(LOADED) == 0
    found = [ask(pair.stack, prompt) for prompt in EVERY]
    assert [[answer.choices[0].text] for answer in found] == wanted
    assert all(not_computed(answer) >= TOKENS - 1 for answer in found)
    assert prefill.metric(LOADED) > 0
    assert decode.metric(LOADED) == 0, "NIXL has the whole prompt"
    assert decode.metric("dynamo_component_kv_transfers_lost_total") == 0
    # A decode worker alone computes several choices: it loads the prompts that it fetched before.
    more = {"n": 2, "seed": 7, "temperature": 0.8}
    assert texts(pair.stack, EVERY, **more) == texts(one_worker, EVERY, **more)
    assert decode.metric(LOADED) > 0
    assert pair.is_alive()


@pytest.mark.more
def test_mixed_load_on_prefill_and_decode_equals_one_engine(pair: Pairs, one_worker: Stack) -> None:
    every = prompts(24, 1500, seed=11)
    assert texts(pair.stack, every) == texts(one_worker, every) == texts(pair.stack, every)


@pytest.mark.more
def test_replaced_adapter_is_never_answered_from_the_old_ones_cache(
    warm: Zygote, model: Path, tmp_path: Path, adapters: dict[str, Path]
) -> None:
    """The folder stays the same, too: vLLM knows an adapter by its name and folder."""
    folder = tmp_path / "adapter"
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *SMALL, "--enable-lora", "--max-lora-rank", "8")
        made.wait_ready(120)
        answers = []
        for seed in (1, 3):
            make_adapter(folder, model, seed=seed)
            assert worker.admin("load_lora", lora_name="a", source={"uri": str(folder)}).status_code == 200
            until("the adapter", lambda: "a" in [m.id for m in made.openai.models.list().data])
            cold = texts(made, EVERY[:4], model="a")
            again = [ask(made, prompt, model="a") for prompt in EVERY[:4]]
            assert [[answer.choices[0].text] for answer in again] == cold
            assert all(cached(answer) >= TOKENS - BLOCK_TOKENS for answer in again)
            answers.append(cold)
            assert worker.admin("unload_lora", lora_name="a").status_code == 200
        assert answers[0] != answers[1]
        assert worker.metric(LOADED) > 0
