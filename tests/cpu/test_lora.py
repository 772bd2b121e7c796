"""Tests LoRA adapters in real engines: the right output, the right worker, and nothing half-loaded."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from cpu.lora import LORA, PROMPTS, Expected, ask, load, loaded, text, who
from cpu.streams import Load
from harness.adapters import make_adapter, read_safetensors
from harness.stack import Stack, stack
from harness.waiting import until
from harness.warm import Zygote

REQUESTS, CONCURRENCY = 100, 8


@pytest.fixture(scope="module")
def two(warm: Zygote, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("two")) as made:
        made.start_frontend()
        for _ in range(2):
            warm.start_worker(made, model, *LORA, env={"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9"})
        yield made.wait_ready(120)


@pytest.fixture
def workers(two: Stack) -> Iterator[Stack]:
    """Yields workers without adapters, and removes those that a test loads."""
    yield two
    left = [(worker, name) for worker in two.workers for name in loaded(worker)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(lambda one: one[0].admin("unload_lora", lora_name=one[1]).status_code, left))
    assert done == [200] * len(left)
    until("only the base model", lambda: two.models() == ["tiny"])


@pytest.fixture
def both(workers: Stack, adapters: dict[str, Path]) -> Stack:
    """Loads a and b on both workers."""
    for worker in workers.workers:
        for name in "ab":
            answer = load(worker, name, adapters[name])
            assert answer.status_code == 200, answer.text
    until("the adapters", lambda: sorted(workers.models()) == ["a", "b", "tiny"])
    return workers


def test_mixed_requests_equal_bare_vllm(both: Stack, expected: Expected) -> None:
    chance = random.Random(5)
    asked = [(chance.choice(["tiny", "a", "b"]), chance.randrange(PROMPTS)) for _ in range(REQUESTS)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda case: ask(both, *case), asked))
    wrong = [
        case for case, answer in zip(asked, answers, strict=True) if answer.choices[0].text != expected[case]
    ]
    assert wrong == []
    assert len({who(answer) for answer in answers}) == 2
    assert len({expected[name, 0] for name in ("tiny", "a", "b")}) == 3, "the adapters change nothing"


def test_logprobs_of_a_prompt_are_refused_and_end_no_engine(workers: Stack) -> None:
    """vLLM 0.30 on CPU: with another request they would crash an engine with LoRA enabled."""
    body = {"model": "tiny", "prompt": [10 + i % 90 for i in range(30)], "max_tokens": 8, "ignore_eos": True}
    asked = [body | {"prompt_logprobs": 1} if i % 2 else body for i in range(8)]
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        answers = list(pool.map(lambda one: workers.post("/v1/completions", one), asked))
    assert [answer.status_code for answer in answers] == [200, 400] * 4
    assert "prompt_logprobs" in answers[1].text


def test_cached_prefixes_are_not_shared_between_adapters(both: Stack) -> None:
    def cached(model: str) -> tuple[int, int]:
        answer = both.openai.completions.create(
            model=model,
            prompt=[11 + i * 7 % 800 for i in range(640)],
            max_tokens=2,
            temperature=0,
            extra_body={"nvext": {"extra_fields": ["worker_id"]}},
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return who(answer), answer.usage.prompt_tokens_details.cached_tokens or 0

    first = {name: cached(name) for name in ("tiny", "a", "b")}
    assert [tokens for _, tokens in first.values()] == [0, 0, 0]
    for name, (worker, _) in first.items():
        again, tokens = cached(name)
        assert (again, tokens >= 608) == (worker, True), f"{name} was not sent where it is cached"


def test_adapter_on_one_worker_is_asked_there(
    workers: Stack, adapters: dict[str, Path], expected: Expected
) -> None:
    assert load(workers.workers[0], "a", adapters["a"]).status_code == 200
    until("the adapter", lambda: "a" in workers.models())
    answers = [ask(workers, "a", number) for number in range(PROMPTS)]
    assert [answer.choices[0].text for answer in answers] == [expected["a", n] for n in range(PROMPTS)]
    assert len({who(answer) for answer in answers}) == 1


def test_fifty_loads_at_once_are_one(workers: Stack, adapters: dict[str, Path]) -> None:
    worker = workers.workers[0]
    with ThreadPoolExecutor(50) as pool:
        replies = list(pool.map(lambda _: load(worker, "many", adapters["a"]).json(), range(50)))
    assert {reply["status"] for reply in replies} == {"success"}
    assert len({reply["lora_id"] for reply in replies}) == 1
    assert worker.log.read_text().count("adapter many: loaded from") == 1


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
        with pytest.raises(openai.NotFoundError):
            ask(both, "b", 0)
        # The same name with other content: nothing of the old one may be found in a cache.
        for worker in both.workers:
            assert load(worker, "b", adapters["c"]).status_code == 200
        until("b to be back", lambda: "b" in both.models())
        assert [text(both, "b", n) for n in range(PROMPTS)] == [expected["c", n] for n in range(PROMPTS)]
    others = [failure for failure in traffic.failures if not failure.startswith("b: NotFoundError")]
    assert others == []
    assert [loaded(worker) for worker in both.workers] == [["a", "b"], ["a", "b"]]


def test_third_adapter_has_no_room(both: Stack, adapters: dict[str, Path]) -> None:
    answer = load(both.workers[0], "c", adapters["c"])
    assert (answer.status_code, answer.json()["error"]) == (409, "no_room")
    assert "2 of 2" in answer.json()["message"] and "--max-loras" in answer.json()["message"]


def test_other_content_under_a_loaded_name_is_a_conflict(both: Stack, adapters: dict[str, Path]) -> None:
    assert load(both.workers[0], "b", adapters["b"]).json()["already_loaded"] is True
    answer = load(both.workers[0], "b", adapters["c"])
    assert (answer.status_code, answer.json()["error"]) == (409, "adapter_conflict")
    assert load(both.workers[0], "tiny", adapters["c"]).status_code == 409


def test_unknown_names(workers: Stack) -> None:
    assert workers.workers[0].admin("unload_lora", lora_name="nobody").status_code == 404
    with pytest.raises(openai.NotFoundError):
        ask(workers, "nobody", 0)


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


Spoil = Callable[[Path, Path], "Path | str"]


def missing(folder: Path, _: Path) -> Path:
    shutil.rmtree(folder)
    return folder


def empty(folder: Path, _: Path) -> Path:
    for file in folder.iterdir():
        file.unlink()
    return folder


def truncated(folder: Path, _: Path) -> Path:
    weights = folder / "adapter_model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    return folder


def high_rank(folder: Path, model: Path) -> Path:
    return make_adapter(folder, model, rank=64)


def wrong_shape(folder: Path, model: Path) -> Path:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    return make_adapter(folder, model, tensors={name: np.zeros((8, 128), np.float32)})


def unknown_module(folder: Path, model: Path) -> Path:
    stem = "base_model.model.model.layers.0.self_attn.x_proj"
    more = {
        f"{stem}.lora_A.weight": np.zeros((8, 256), np.float32),
        f"{stem}.lora_B.weight": np.zeros((256, 8), np.float32),
    }
    return make_adapter(folder, model, tensors=more)


def not_a_number(folder: Path, model: Path) -> Path:
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    header, _ = read_safetensors(folder / "adapter_model.safetensors")
    values = np.zeros(header[name]["shape"], np.float32)
    values[3, 3] = np.nan
    return make_adapter(folder, model, tensors={name: values})


def outside(folder: Path, _: Path) -> Path:
    weights = folder / "adapter_model.safetensors"
    elsewhere = folder.parent / "elsewhere.safetensors"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    return folder


def unreachable(_: Path, __: Path) -> str:
    return "s3://bucket/adapter"


def bomb(folder: Path, _: Path) -> Path:
    """Writes eight bytes that declare a header of an exabyte."""
    (folder / "adapter_model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return folder


def other_base(folder: Path, model: Path) -> Path:
    """Makes an adapter for a model with more layers."""
    stem = "base_model.model.model.layers.40.self_attn.q_proj"
    more = {
        f"{stem}.lora_A.weight": np.zeros((8, 256), np.float32),
        f"{stem}.lora_B.weight": np.zeros((256, 8), np.float32),
    }
    return make_adapter(folder, model, tensors=more, config={"base_model_name_or_path": "big/model"})


BAD: dict[str, tuple[Spoil, int, str, str]] = {
    "missing": (missing, 502, "source_failed", "No such file or directory"),
    "empty": (empty, 422, "adapter_refused", "adapter_config.json"),
    "truncated": (truncated, 422, "adapter_refused", ""),
    "rank": (high_rank, 422, "adapter_refused", "64"),
    "shape": (wrong_shape, 422, "adapter_refused", "layers.0.self_attn.q_proj"),
    "module": (unknown_module, 422, "adapter_refused", "x_proj"),
    "NaN": (not_a_number, 422, "adapter_refused", "layers.1.self_attn.v_proj"),
    "traversal": (outside, 422, "adapter_refused", "leads out of the folder"),
    "unreachable": (unreachable, 502, "source_failed", "127.0.0.1:9"),
    "bomb": (bomb, 422, "adapter_refused", ""),
    "wrong base": (other_base, 422, "adapter_refused", "big/model"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapter_leaves_nothing_behind(
    kind: str, workers: Stack, model: Path, tmp_path: Path, expected: Expected
) -> None:
    spoil, status, error, said = BAD[kind]
    worker = workers.workers[0]
    answer = load(worker, "bad", spoil(make_adapter(tmp_path / "bad", model), model))
    assert (answer.status_code, answer.json()["error"]) == (status, error), answer.text
    assert said in answer.json()["message"]
    assert loaded(worker) == [] and workers.models() == ["tiny"]
    entry = worker.admin("list_loras").json()["loras"]
    assert [(e["name"], e["state"]) for e in entry] in ([], [("bad", "failed")])
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
