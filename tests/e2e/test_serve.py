"""One command on the default path: `dynamo-vllm serve` with its demo model, spoken to over HTTP."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from harness.adapters import make_adapter
from harness.hub import hub
from harness.processes import COMMAND, command_line, survivors
from harness.served import Serving, served
from harness.stack import Stack, environment, stack
from harness.waiting import until

SUM = "What is 17 + 25?"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(tmp_path_factory.mktemp("serve")) as running:
        running.first_token_seconds = [seconds_to_first_token(running) for _ in range(4)]
        yield running


def seconds_to_first_token(running: Serving) -> float:
    began = time.monotonic()
    with ask(running, SUM, stream=True) as chunks:
        next(chunk for chunk in chunks if chunk.choices and text_of(chunk.choices[0].delta))
        return time.monotonic() - began


def ask(running: Serving, text: str, **more: Any) -> Any:
    return running.chat(text, temperature=0, **more)


def text_of(delta: Any) -> str:
    return (delta.content or "") + (getattr(delta, "reasoning_content", None) or "")


def test_ready_line_says_where_and_what_and_then_what_to_try(serving: Serving) -> None:
    url = f"http://127.0.0.1:{serving.stack.port}/v1"
    assert serving.ready_line == f"ready: {url} model=demo-chat workers=1"
    assert f"  try: dynamo-vllm chat {url.removesuffix('/v1')}\n" in serving.output.read_text()


def test_first_token_comes_at_once(serving: Serving) -> None:
    """Or as late as later ones, where the machine is slow."""
    first, *later = serving.first_token_seconds
    limit = max(9, 20 * statistics.median(later))
    assert first < limit, "0.1 s here; what a first request builds took 10 s and more"


def test_openai_client_lists_chats_and_streams(serving: Serving) -> None:
    assert [model.id for model in serving.stack.openai.models.list()] == ["demo-chat"]
    answer = ask(serving, SUM).choices[0].message
    assert answer.content == "17 + 25 = 42"
    assert "7+5+0=12" in answer.reasoning_content, "the columns of the sum"
    deltas = [chunk.choices[0].delta for chunk in ask(serving, SUM, stream=True) if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == answer.content


def test_chat_command_finds_the_serve_that_runs_and_asks_it(serving: Serving) -> None:
    env = environment(serving.stack.folder, XDG_CACHE_HOME=str(serving.stack.folder / "cache"))
    done = subprocess.run(
        [*COMMAND, "chat", "--temperature", "0"],
        input=SUM,
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stdout) == (0, "17 + 25 = 42\n"), done.stderr


def test_check_proves_the_running_system(serving: Serving) -> None:
    check(serving)


def check(running: Serving) -> None:
    command = [*COMMAND, "check", "--live", running.stack.url, "--strict"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_status_shows_the_model(serving: Serving) -> None:
    done = subprocess.run([*COMMAND, "status", serving.stack.url], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and "demo-chat" in done.stdout


def test_prefill_and_decode_answer_like_one_worker(serving: Serving, tmp_path: Path) -> None:
    prompts = [[10 + (i * 31 + length) % 850 for i in range(length)] for length in (3, 32, 100, 900)]
    with served(tmp_path, "--prefill", "1", "--decode", "1") as pair:
        assert pair.ready_line.endswith(" model=demo-chat workers=2")
        for prompt in prompts:
            wanted, found = (complete(one, prompt) for one in (serving, pair))
            assert found.choices[0].text == wanted.choices[0].text
            moved = found.model_extra["nvext"]["engine_data"]["decode_cached_tokens"]
            assert moved == len(prompt), "decode computed nothing"
        assert ask(pair, SUM).choices[0].message.content == "17 + 25 = 42"
        check(pair)
        below = pair.below()
        pair.process.send_signal(signal.SIGINT)
        assert pair.process.wait(40) == 0, pair.output.read_text()
        assert survivors(below) == []


def complete(running: Serving, prompt: list[int]) -> Any:
    extra = {"ignore_eos": True, "nvext": {"extra_fields": ["engine_data"]}}
    return running.stack.openai.completions.create(
        model="demo-chat", prompt=prompt, max_tokens=16, temperature=0, extra_body=extra
    )


def test_worker_and_engine_core_share_what_the_zygote_imported(serving: Serving) -> None:
    zygote, core = serving.called("zygote"), serving.engine_core()
    worker = serving.called("dynamo-vllm worker")
    assert (zygote.ppid(), worker.ppid(), core.ppid()) == (
        serving.process.pid,
        serving.process.pid,
        worker.pid,
    )
    assert zygote.num_threads() == 1
    own = worker.memory_full_info().uss  # an import of its own would be half a gigabyte
    assert own < 0.7 * zygote.memory_info().rss, "most of what a worker has is shared"
    assert "cannot be forked" not in serving.output.read_text()


def test_killed_engine_core_is_replaced(serving: Serving) -> None:
    zygote = serving.called("zygote")
    old = [serving.called("dynamo-vllm worker"), serving.engine_core()]
    serving.engine_core().kill()
    until("the model to go", lambda: serving.stack.models() == [])
    assert survivors(old, 60) == [], "the old worker and all of its engine are gone"
    serving.came_back()
    assert serving.called("zygote") == zygote, "the new ones were forked from the same process"


@pytest.mark.more
def test_killed_zygote_costs_nothing_and_the_next_worker_gets_another(serving: Serving) -> None:
    zygote, core = serving.called("zygote"), serving.engine_core()
    zygote.kill()
    assert survivors([zygote], 30) == []
    assert ask(serving, SUM).choices[0].message.content == "17 + 25 = 42"
    assert serving.engine_core() == core, "who was forked from it goes on"
    core.kill()
    until("the model to go", lambda: serving.stack.models() == [])
    serving.came_back()
    assert serving.called("zygote") != zygote


def test_interrupt_ends_everything(serving: Serving) -> None:
    """Last: nothing of the deployment survives."""
    below = serving.below()
    serving.process.send_signal(signal.SIGINT)
    assert serving.process.wait(40) == 0, serving.output.read_text()
    assert survivors(below) == []
    with pytest.raises(openai.APIConnectionError):
        serving.stack.openai.models.list()


@pytest.mark.long
def test_processes_that_start_afresh_answer_alike(tmp_path: Path) -> None:
    with served(tmp_path, "--no-fork") as running:
        assert [p for p in running.below() if "zygote" in " ".join(command_line(p))] == []
        assert ask(running, SUM).choices[0].message.content == "17 + 25 = 42"


@pytest.mark.long
def test_killed_worker_takes_its_engine_along(tmp_path: Path) -> None:
    """Without a supervisor: vLLM alone would leave the engine core running."""
    from dynamo_vllm.models.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "tiny")
    with stack(tmp_path) as made:
        worker = made.start_worker("--model", str(model), "--enforce-eager", "--max-model-len", "512")
        until("a ready worker", worker.is_ready, 150, every=0.2)
        below = psutil.Process(worker.pid).children(recursive=True)
        (core,) = [p for p in below if "EngineCore" in " ".join(command_line(p))]
        assert os.getpgid(core.pid) == core.pid, "a Ctrl-C in a terminal must not reach it before the drain"
        os.kill(worker.pid, signal.SIGKILL)
        assert survivors(below) == []


@pytest.mark.long
def test_model_and_adapter_come_from_the_hub_at_their_revisions(tmp_path: Path) -> None:
    from dynamo_vllm.models.tiny import make_tiny_model

    model = make_tiny_model(tmp_path / "tiny")
    adapter = make_adapter(tmp_path / "adapter", model)
    engine = ("--enforce-eager", "--max-model-len", "512", "--enable-lora", "--max-loras", "2")
    with hub("team/tiny", {"config.json": b"not this one"}) as (remote, address), stack(tmp_path) as made:
        remote.tags = {"v1": contents(model), "sql": contents(adapter)}
        made.start_frontend()
        worker = made.start_worker(
            *("--model", "team/tiny", "--revision", "v1"),
            *("--download-dir", str(tmp_path / "models"), *engine),
            env={"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"},
        )
        made.wait_ready(150)
        assert made.models() == ["team/tiny"]
        loaded = worker.admin("load_lora", lora_name="sql", source={"uri": "hf://team/tiny@sql"})
        assert loaded.status_code == 200, loaded.text
        for name in ("team/tiny", "sql"):
            until(f"{name} listed", partial(lists, made, name))
            body = {"model": name, "prompt": "once upon", "max_tokens": 3}
            assert made.post("/v1/completions", body).status_code == 200
        assert os.listdir(tmp_path / "models")


def lists(made: Stack, model: str) -> bool:
    return model in made.models()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_python_dash_m_is_a_worker() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dynamo_vllm", "--help"], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and "--use-vllm-tokenizer" in done.stdout
