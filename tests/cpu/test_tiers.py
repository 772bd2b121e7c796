"""Tests KV caches that leave an engine for host memory: they come back with the same answers."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from cpu.completions import complete, texts
from cpu.lora import load, unload_all
from cpu.pairs import LOST, Pairs, prompts
from cpu.slow_copies import CALL, HOLD
from cpu.stacks import Start
from harness.adapters import make_adapter
from harness.stack import Stack, Worker
from harness.waiting import until
from harness.warm import WARMED

TOKENS = 1000
"""Not whole blocks: of a prompt of whole blocks vLLM loads the last one from the tier though it has it."""
BLOCK_TOKENS = 32
SMALL = ("--num-gpu-blocks-override", "80", "--block-size", str(BLOCK_TOKENS), "--kv-offload-gb", "0.1")
"""An engine that holds two prompts, before a tier that holds them all."""
LOADED, STORED = "vllm:kv_offload_load_bytes_total", "vllm:kv_offload_store_bytes_total"
READ = "vllm:kv_offload_tiering_read_bytes_total"
EVERY = [[start + token % 700 for token in range(TOKENS)] for start in range(20, 28)]


@pytest.fixture(scope="module")
def keeping(start_module: Start) -> Stack:
    return start_module(*SMALL)


@pytest.fixture(scope="module")
def tiered_pair(start_module: Start) -> Pairs:
    return start_module.pair(*SMALL, "--connector", "offload", "nixl")


@pytest.fixture(scope="module")
def alone(one_worker: Stack) -> list[str]:
    """The texts of an engine without tiers."""
    return answers(one_worker)


def answers(made: Stack, every: list[list[int]] = EVERY, **more: Any) -> list[str]:
    return [text for prompt in every for text in complete(made, prompt, 12, **more).texts]


def settled(worker: Worker) -> float:
    """Returns the bytes that were stored, when no store is under way."""
    until("an idle engine", lambda: worker.busy() == 0)
    return worker.metric(STORED)


def test_answers_from_the_tier_equal_those_of_another_engine(keeping: Stack, alone: list[str]) -> None:
    (worker,) = keeping.workers
    cold, before = answers(keeping), worker.metric(LOADED)
    warm = [complete(keeping, prompt, 12) for prompt in EVERY]
    assert texts(warm) == cold == alone
    # The engine has room for two of eight.
    assert all(answer.cached >= TOKENS - BLOCK_TOKENS for answer in warm)
    assert worker.metric(LOADED) > before


def test_logprobs_of_a_prompt_are_computed_though_the_tier_has_it(keeping: Stack, one_worker: Stack) -> None:
    answers(keeping)
    told = [complete(made, EVERY[0], 1, prompt_logprobs=1).prompt_logprobs for made in (keeping, one_worker)]
    assert len(told[0]) == TOKENS and told[0] == told[1]


@pytest.mark.parametrize(
    "verbs",
    [("clear_kv_blocks",), ("reset_caches",), ("sleep", "wake_up"), ("sleep 2", "wake_up")],
    ids=lambda verbs: verbs[0],
)
def test_what_is_cleared_or_slept_away_is_not_found_in_the_tier(
    keeping: Stack, alone: list[str], verbs: tuple[str, ...]
) -> None:
    (worker,) = keeping.workers
    assert answers(keeping, EVERY[:4]) == alone[:4]
    settled(worker)
    for words in verbs:
        verb, _, level = words.partition(" ")
        assert worker.admin(verb, **({"level": int(level)} if level else {})).json()["status"] == "success"
    cold = [complete(keeping.wait_ready(120), prompt, 12) for prompt in EVERY[:4]]
    assert [answer.cached for answer in cold] == [0] * 4
    assert texts(cold) == alone[:4]


def test_refused_clear_leaves_the_tier_as_it_is(keeping: Stack) -> None:
    (worker,) = keeping.workers
    answers(keeping)  # the first is now only in the tier
    settled(worker)
    with keeping.openai.completions.with_streaming_response.create(
        model="tiny", prompt=EVERY[7], max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    ):
        until("a running request", lambda: worker.busy() == 1)
        refused = worker.admin("clear_kv_blocks").json()
        assert (refused["status"], "in use" in refused["message"]) == ("error", True)
    until("an idle engine", lambda: worker.busy() == 0)
    assert complete(keeping, EVERY[0]).cached >= TOKENS - BLOCK_TOKENS


def test_tier_that_is_being_filled_can_be_cleared_again_and_again(start: Start, tmp_path: Path) -> None:
    """vLLM itself would refuse the second time, and sleep, until somebody asks something."""
    hold = tmp_path / "hold"
    made = start(*SMALL, env={HOLD: str(hold)}, call=CALL)
    (worker,) = made.workers
    hold.touch()
    before = complete(made, EVERY[0])
    for verb in ("clear_kv_blocks", "clear_kv_blocks", "sleep", "wake_up"):
        assert worker.admin(verb).status_code == 200
    hold.unlink()
    after = complete(made.wait_ready(120), EVERY[0])
    assert (after.cached, after.text) == (0, before.text)
    assert complete(made, EVERY[0]).cached > 0


def disk_flags(folder: Path) -> tuple[str, ...]:
    return (*SMALL, "--kv-offload-gb", "0.02", "--kv-offload-disk", f"{folder}/kv:0.2")


def test_restarted_worker_finds_its_caches_on_disk_unless_they_were_cleared(
    start: Start, tmp_path: Path, alone: list[str]
) -> None:
    """The warm-up of each start forgets its own prompts, and nothing of an earlier run."""
    made = start.frontend()
    for clears, finds in ((False, False), (True, True), (False, False)):
        worker = start.warm.start_worker(made, start.model, *disk_flags(tmp_path), env=WARMED)
        made.wait_ready(120)
        assert answers(made, EVERY[:2]) == alone[:2]
        assert (worker.metric(READ) > 0) is finds
        assert answers(made) == alone
        wait_on_disk(worker)
        if clears:
            assert worker.admin("clear_kv_blocks").status_code == 200
        end(made, worker)


def test_worker_whose_disk_is_lost_starts_and_computes(start: Start, alone: list[str]) -> None:
    made = start(*SMALL, "--kv-offload-disk", "/proc/lost:1")
    (worker,) = made.workers
    assert answers(made, EVERY[:2]) == alone[:2]
    lines = worker.log.read_text().splitlines()
    assert sum("--kv-offload-disk /proc/lost:1" in line for line in lines) == 1
    until("it is paused", lambda: worker.metric("vllm:kv_offload_disk_paused") == 1)


@pytest.mark.more
def test_adapter_replaced_across_a_restart_is_not_answered_from_the_old_ones_disk(
    start: Start, tmp_path: Path
) -> None:
    folder, told = tmp_path / "adapter", dict[int, list[str]]()
    modules = ("--lora-enabled", "--lora-modules", f"a={folder}")
    made = start.frontend()
    for seed, finds in ((1, False), (3, False), (1, True)):
        make_adapter(folder, start.model, seed=seed)
        worker = start.warm.start_worker(made, start.model, *disk_flags(tmp_path), *modules)
        made.wait_ready(120).wait_listed("a")
        adapted = answers(made, model="a")
        assert adapted == told.setdefault(seed, adapted)
        assert (worker.metric(READ) > 0) is finds
        wait_on_disk(worker)
        end(made, worker)
    assert told[1] != told[3]


def wait_on_disk(worker: Worker) -> None:
    whole = len(EVERY) * (TOKENS // BLOCK_TOKENS)
    until("all on disk", lambda: worker.metric("vllm:kv_offload_disk_chunks") >= whole)


def end(made: Stack, worker: Worker) -> None:
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(60) == 0
    made.workers.remove(worker)
    until("no worker", lambda: not made.instances())


def test_prefill_and_decode_workers_load_from_their_tiers(
    tiered_pair: Pairs, one_worker: Stack, alone: list[str]
) -> None:
    made, (prefill,), (decode,) = tiered_pair.stack, tiered_pair.prefills, tiered_pair.decodes
    assert answers(made) == alone  # cold
    assert answers(made, EVERY[-1:]) == alone[-1:]  # in the engines' own caches
    assert prefill.metric(LOADED) == 0
    warm = [complete(made, prompt, 12) for prompt in EVERY]
    assert texts(warm) == alone
    assert all(answer.not_computed >= TOKENS - 1 for answer in warm)
    assert prefill.metric(LOADED) > 0
    assert decode.metric(LOADED) == 0, "NIXL has the whole prompt"
    assert decode.metric(LOST) == 0
    # A decode worker alone computes several choices: it loads the prompts that it fetched before.
    more: dict[str, Any] = {"n": 2, "seed": 7, "temperature": 0.8}
    assert answers(made, **more) == answers(one_worker, **more)
    assert decode.metric(LOADED) > 0
    assert tiered_pair.is_alive()


@pytest.mark.more
def test_mixed_load_on_prefill_and_decode_equals_one_engine(tiered_pair: Pairs, one_worker: Stack) -> None:
    every = prompts(24, 1500, seed=11)
    cold, expected, warm = (answers(m, every) for m in (tiered_pair.stack, one_worker, tiered_pair.stack))
    assert cold == expected == warm


@pytest.mark.more
def test_replaced_adapter_is_never_answered_from_the_old_ones_cache(start: Start, tmp_path: Path) -> None:
    """The folder stays the same, too: vLLM knows an adapter by its name and folder."""
    made, told = start(*SMALL, "--enable-lora", "--max-lora-rank", "8"), []
    (worker,) = made.workers
    for seed in (1, 3):
        folder = make_adapter(tmp_path / "adapter", start.model, seed=seed)
        assert load(worker, "a", folder).status_code == 200
        made.wait_listed("a")
        told.append(answers(made, EVERY[:4], model="a"))
        again = [complete(made, prompt, 12, model="a") for prompt in EVERY[:4]]
        assert texts(again) == told[-1]
        assert all(answer.cached >= TOKENS - BLOCK_TOKENS for answer in again)
        unload_all(made)
    assert told[0] != told[1]
    assert worker.metric(LOADED) > 0
