"""Tests LoRA adapters combined with other features, on workers that load them at their start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cpu.lora import LORA, PROMPTS, Expected, ask, load, prompt, who
from cpu.ranks import rank
from cpu.streams import stream
from cpu.test_two_workers import LONG, busy_worker
from harness.processes import COMMAND
from harness.stack import Stack, Worker, environment, stack
from harness.tensors import encode, table
from harness.waiting import until, until_spread
from harness.warm import Zygote

pytestmark = pytest.mark.more

TOKEN = "geheim"


def start(made: Stack, warm: Zygote, model: Path, adapters: dict[str, Path], *flags: str) -> Worker:
    modules = [f"{name}={adapters[name]}" for name in "ab"]
    shared = (*LORA, "--enable-prompt-embeds", "--max-num-batched-tokens", "256", "--drain-seconds", "2")
    env = {"DYN_VLLM_ADMIN_TOKEN": TOKEN}
    return warm.start_worker(made, model, *shared, *flags, "--lora-modules", *modules, env=env)


@pytest.fixture(scope="module")
def two(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Yields one worker with direct egress and one without; long prompts are computed in several steps."""
    with stack(tmp_path_factory.mktemp("combined")) as made:
        made.start_frontend()
        for flag in ("--direct-egress", "--no-direct-egress"):
            start(made, warm, model, adapters, flag)
        yield made.wait_ready(120)


def answers(made: Stack, *names: str) -> dict[tuple[str, int], Any]:
    """Returns the answers to all prompts, several at once."""
    cases = [(name, number) for name in names for number in range(PROMPTS)]
    with ThreadPoolExecutor(4) as pool:
        return dict(zip(cases, pool.map(lambda case: ask(made, *case), cases), strict=True))


def assert_equal(found: dict[tuple[str, int], Any], expected: Expected) -> None:
    texts = {case: answer.choices[0].text for case, answer in found.items()}
    assert texts == {case: expected[case] for case in found}


def admin(worker: Worker, verb: str, token: str, **body: Any) -> httpx.Response:
    url = f"http://127.0.0.1:{worker.system_port}/engine/{verb}"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=60)


def command(made: Stack, *words: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    env = environment(made.folder, DYN_VLLM_ADMIN_TOKEN=token)
    return subprocess.run([*COMMAND, *words], env=env, capture_output=True, text=True, timeout=60)


def test_both_ways_out_of_the_engine_equal_bare_vllm(two: Stack, expected: Expected) -> None:
    assert sorted(two.models()) == ["a", "b", "tiny"]
    answered: set[tuple[str, int]] = set()

    def every_adapter_by_both() -> bool:
        found = answers(two, "tiny", "a", "b")
        assert_equal(found, expected)
        answered.update((model, who(answer)) for (model, _), answer in found.items())
        return len(answered) == 6

    until("both workers to have answered with each", every_adapter_by_both)


def test_prompt_embeddings_are_answered_by_the_adapter(two: Stack, model: Path, expected: Expected) -> None:
    known = table(model)
    for name in ("a", "tiny"):
        for number in range(1, 6):
            sent = encode(known[prompt(number)].clone())
            answer = two.openai.completions.create(
                model=name,
                prompt="",
                max_tokens=16,
                temperature=0,
                extra_body={"ignore_eos": True, "prompt_embeds": sent},
            )
            assert answer.choices[0].text == expected[name, number]


@pytest.mark.parametrize("name", ["tiny", "a"])
def test_salted_prompt_goes_where_it_is_cached_and_counts_for_no_other(two: Stack, name: str) -> None:
    def asked(number: int, salt: str | None) -> tuple[int, int, float]:
        nvext = {"extra_fields": ["worker_id", "timing"]} | ({"cache_salt": salt} if salt else {})
        answer = two.openai.completions.create(
            model=name,
            prompt=[10 + (number * 97 + i * 13) % 850 for i in range(640)],
            max_tokens=2,
            temperature=0,
            extra_body={"nvext": nvext},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        rate = float(answer.model_extra["nvext"]["timing"].get("kv_hit_rate") or 0)  # type: ignore[index]
        return who(answer), answer.usage.prompt_tokens_details.cached_tokens or 0, rate

    first = until_spread(lambda number: asked(number, "mine"), lambda answer: answer[0])
    again = [asked(number, "mine") for number in range(len(first))]
    assert again == [(worker, 608, 1.0) for worker, _, _ in first]
    for salt in ("other", None):
        assert asked(0, salt)[1:] == (0, 0.0)


@pytest.mark.long
def test_commands_need_the_token_and_change_real_workers(
    two: Stack, adapters: dict[str, Path], expected: Expected
) -> None:
    answer = admin(two.workers[0], "list_loras", "falsch")
    assert (answer.status_code, answer.json()["error"]) == (401, "not_allowed")
    refused = command(two, "lora", "unload", "b", token="falsch")
    assert (refused.returncode, refused.stderr.count("not_allowed")) == (1, 2)
    assert TOKEN not in refused.stderr

    assert command(two, "lora", "unload", "b").stdout.count(": unloaded\n") == 2
    until("b to be gone", lambda: sorted(two.models()) == ["a", "tiny"])
    done = command(two, "lora", "load", "b", str(adapters["b"]))
    assert (done.returncode, done.stdout.count(": loaded in ")) == (0, 2), done.stderr
    until("b to be back", lambda: sorted(two.models()) == ["a", "b", "tiny"])
    listed = json.loads(command(two, "lora", "list", "--json").stdout)
    assert str(listed).count("'loaded'") == 4

    slept = command(two, "sleep", "--worker", "1", "--level", "2")
    assert (slept.returncode, slept.stdout.count("asleep after")) == (0, 1), slept.stderr
    assert len({who(ask(two, "b", number)) for number in range(4)}) == 1
    woken = command(two, "wake", "--all")
    assert (woken.returncode, woken.stdout.count("awake")) == (0, 2), woken.stderr
    until("both workers", lambda: len(two.instances()) == 2)
    assert_equal(answers(two, "a", "b"), expected)


@pytest.mark.long
def test_killed_worker_in_mid_stream(
    two: Stack, warm: Zygote, model: Path, adapters: dict[str, Path]
) -> None:
    """The other worker continues with the adapter, and a new worker has it from its start."""
    undisturbed = list(stream(two, 9, LONG, model="a"))
    text, chunks = "", iter(stream(two, 9, LONG, model="a"))
    for _ in range(20):
        text += next(chunks).choices[0].text
    killed = busy_worker(two)
    os.killpg(killed.pid, signal.SIGKILL)
    usage = None
    for chunk in chunks:
        text += chunk.choices[0].text if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == "".join(c.choices[0].text for c in undisturbed if c.choices)
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (40, LONG)
    two.workers.remove(killed)
    fresh = start(two, warm, model, adapters)
    until("the new worker", fresh.is_ready, 120)
    listed = admin(fresh, "list_loras", TOKEN).json()["loras"]
    assert [(entry["name"], entry["state"]) for entry in listed] == [("a", "loaded"), ("b", "loaded")]


@pytest.mark.long
def test_text_mode(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path: Path, expected: Expected
) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *LORA, "--use-vllm-tokenizer")
        made.wait_ready(120)
        assert load(worker, "a", adapters["a"]).status_code == 200
        until("the adapter", lambda: "a" in made.models())
        assert_equal(answers(made, "a") | {("tiny", 0): ask(made, "tiny", 0)}, expected)
        chat = made.openai.chat.completions.create(
            model="a", messages=[{"role": "user", "content": "hi"}], max_tokens=3
        )
        assert (chat.model, chat.usage.completion_tokens) == ("a", 3)  # type: ignore[union-attr]
        with pytest.raises(openai.NotFoundError):
            ask(made, "b", 0)

        def cached(**nvext: str) -> int:
            answer = made.openai.completions.create(
                model="a", prompt=[50] * 320, max_tokens=1, extra_body={"nvext": nvext}
            )
            return int(answer.usage.prompt_tokens_details.cached_tokens or 0)  # type: ignore[union-attr]

        assert [cached(), cached(), cached(cache_salt="s"), cached(cache_salt="s")] == [0, 288, 0, 288]


@pytest.mark.long
def test_data_parallel_ranks(
    warm: Zygote, model: Path, adapters: dict[str, Path], tmp_path: Path, expected: Expected
) -> None:
    with stack(tmp_path) as made:
        made.start_frontend()
        worker = warm.start_worker(made, model, *LORA, "--data-parallel-size", "2")
        made.wait_ready(120)
        assert load(worker, "a", adapters["a"]).status_code == 200
        until("the adapter", lambda: "a" in made.models())
        found = answers(made, "a")
        assert {rank(answer) for answer in found.values()} == {0, 1}
        assert_equal(found, expected)
        assert worker.admin("unload_lora", lora_name="a").status_code == 200
