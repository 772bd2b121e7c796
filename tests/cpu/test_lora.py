"""Tests LoRA adapters in real engines: the right output, the right worker, and nothing half-loaded."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from cpu.completions import PATH, body, complete, texts
from cpu.lora import LORA, PROMPTS, Expected, ask, load, load_all, loaded, text, unload_all
from cpu.stacks import Start
from cpu.streams import Load
from harness.adapters import make_adapter
from harness.stack import Stack
from harness.waiting import until

REQUESTS, CONCURRENCY = 100, 8


@pytest.fixture(scope="module")
def two(start_module: Start) -> Stack:
    return start_module(*LORA, workers=2, env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"})


@pytest.fixture
def workers(two: Stack) -> Iterator[Stack]:
    """Yields workers without adapters, and removes those that a test loads."""
    yield two
    unload_all(two)


@pytest.fixture
def both(workers: Stack, adapters: dict[str, Path]) -> Stack:
    """Loads a and b on both workers."""
    load_all(workers, adapters, "a", "b")
    return workers


def test_mixed_requests_equal_bare_vllm(both: Stack, expected: Expected) -> None:
    chance = random.Random(5)
    asked = [(chance.choice(["tiny", "a", "b"]), chance.randrange(PROMPTS)) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda case: ask(both, *case), asked))
    assert texts(answers) == [expected[case] for case in asked]
    assert len({answer.worker for answer in answers}) == 2
    assert len({expected[name, 0] for name in ("tiny", "a", "b")}) == 3, "the adapters change nothing"


def test_logprobs_of_a_prompt_are_refused_and_end_no_engine(workers: Stack) -> None:
    """vLLM 0.30 on CPU: with another request they would crash an engine with LoRA enabled."""
    plain = body([10 + i % 90 for i in range(30)])
    asked = [plain | {"prompt_logprobs": 1} if i % 2 else plain for i in range(8)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda one: workers.post(PATH, one), asked))
    assert [answer.status_code for answer in answers] == [200, 400] * 4
    assert "prompt_logprobs" in answers[1].text


def test_cached_prefixes_are_not_shared_between_adapters(both: Stack) -> None:
    prompt = [11 + i * 7 % 800 for i in range(640)]
    first = {name: complete(both, prompt, 2, model=name) for name in ("tiny", "a", "b")}
    assert [answer.cached for answer in first.values()] == [0, 0, 0]
    for name, answer in first.items():
        again = complete(both, prompt, 2, model=name)
        assert again.worker == answer.worker, f"{name} was not sent where it is cached"
        assert again.cached >= 608


def test_adapter_on_one_worker_is_asked_there(
    workers: Stack, adapters: dict[str, Path], expected: Expected
) -> None:
    assert load(workers.workers[0], "a", adapters["a"]).status_code == 200
    until("the adapter", lambda: "a" in workers.models())
    answers = [ask(workers, "a", number) for number in range(PROMPTS)]
    assert texts(answers) == [expected["a", n] for n in range(PROMPTS)]
    assert len({answer.worker for answer in answers}) == 1


@pytest.mark.long
def test_unload_under_traffic_disturbs_nobody_else(
    both: Stack, adapters: dict[str, Path], expected: Expected
) -> None:
    with Load(both, clients=6, models=("tiny", "a", "b"), max_tokens=40) as traffic:
        traffic.settled(6)
        for worker in both.workers:
            assert worker.admin("unload_lora", lora_name="b").json()["status"] == "success"
        until("b to be gone", lambda: "b" not in both.models())
        traffic.settled(12)
        assert both.post(PATH, body("x", model="b")).status_code == 404
        # The same name with other content: nothing of the old one may be found in a cache.
        for worker in both.workers:
            assert load(worker, "b", adapters["c"]).status_code == 200
        until("b to be back", lambda: "b" in both.models())
        assert [text(both, "b", n) for n in range(PROMPTS)] == [expected["c", n] for n in range(PROMPTS)]
    others = [failure for failure in traffic.failures if not failure.startswith("b: NotFoundError")]
    assert others == []
    assert [loaded(worker) for worker in both.workers] == [["a", "b"], ["a", "b"]]


def test_what_cannot_be_loaded_beside_others(both: Stack, adapters: dict[str, Path]) -> None:
    worker = both.workers[0]
    assert load(worker, "b", adapters["b"]).json()["already_loaded"] is True
    answers = [load(worker, name, adapters["c"]) for name in ("c", "b", "tiny")]
    assert [answer.status_code for answer in answers] == [409, 409, 409]
    assert [answer.json()["error"] for answer in answers[:2]] == ["no_room", "adapter_conflict"]
    message = answers[0].json()["message"]
    assert "2 of 2" in message and "--max-loras" in message


def test_unknown_names(workers: Stack) -> None:
    assert workers.workers[0].admin("unload_lora", lora_name="nobody").status_code == 404
    assert workers.post(PATH, body("x", model="nobody")).status_code == 404


@pytest.mark.long
def test_adapters_sleep_and_wake_with_their_worker(both: Stack, expected: Expected) -> None:
    """While one worker sleeps, the other has them; while both sleep, nobody lists them."""
    first, second = both.workers
    assert first.admin("sleep", level=2).status_code == 200
    assert [text(both, "a", n) for n in range(4)] == [expected["a", n] for n in range(4)]
    assert load(first, "c", "/x").json()["error"] == "wrong_state"
    assert second.admin("sleep", level=2).status_code == 200
    until("nothing listed", lambda: "a" not in both.models())
    for worker in (first, second):
        assert worker.admin("wake_up").status_code == 200
    until("all listed", lambda: sorted(both.models()) == ["a", "b", "tiny"])
    for name in ("tiny", "a", "b"):
        assert [text(both, name, n) for n in range(4)] == [expected[name, n] for n in range(4)]


def missing(folder: Path, _: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def wrong_shape(folder: Path, model: Path) -> Path:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    return make_adapter(folder, model, tensors={name: np.zeros((8, 128), np.float32)})


@pytest.mark.parametrize(
    ("spoil", "status", "error", "said"),
    [
        (missing, 502, "source_failed", "No such file or directory"),
        (lambda folder, model: "s3://bucket/adapter", 502, "source_failed", "127.0.0.1:9"),
        (lambda folder, model: make_adapter(folder, model, rank=64), 422, "adapter_refused", "64"),
        (wrong_shape, 422, "adapter_refused", "layers.0.self_attn.q_proj"),
    ],
    ids=["missing", "unreachable", "rank", "shape"],
)
def test_bad_adapter_leaves_nothing_behind(
    workers: Stack,
    model: Path,
    tmp_path: Path,
    expected: Expected,
    spoil: Callable[[Path, Path], Path | str],
    status: int,
    error: str,
    said: str,
) -> None:
    """`tests/unit/lora` has every kind."""
    worker = workers.workers[0]
    answer = load(worker, "bad", spoil(make_adapter(tmp_path / "bad", model), model))
    assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
    assert said in answer.json()["message"]
    assert loaded(worker) == [] and workers.models() == ["tiny"]
    entries = worker.admin("list_loras").json()["loras"]
    assert [(e["name"], e["state"]) for e in entries] in ([], [("bad", "failed")])
    assert worker.process.poll() is None
    assert text(workers, "tiny", 3) == expected["tiny", 3]


def cards(made: Stack) -> set[Path]:
    return set((made.folder / "discovery" / "v1" / "mdc").iterdir())


def test_failed_registration_takes_the_adapter_out_of_the_engine(
    workers: Stack, adapters: dict[str, Path], expected: Expected
) -> None:
    """Discovery is a folder here: a folder in place of the adapter's card makes the registration fail."""
    worker, before = workers.workers[0], cards(workers)
    assert load(worker, "a", adapters["a"]).status_code == 200
    (card,) = cards(workers) - before
    assert worker.admin("unload_lora", lora_name="a").status_code == 200
    card.mkdir()
    answer = load(worker, "a", adapters["a"])
    assert (answer.status_code, answer.json()["error"]) == (503, "not_listed"), answer.text
    assert loaded(worker) == [] and workers.models() == ["tiny"]
    assert text(workers, "tiny", 3) == expected["tiny", 3]
    card.rmdir()
    assert load(worker, "a", adapters["a"]).status_code == 200
    until("the adapter", lambda: "a" in workers.models())
    assert text(workers, "a", 3) == expected["a", 3]
