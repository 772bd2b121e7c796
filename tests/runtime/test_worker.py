"""A worker in the real runtime: its place in discovery, its errors over HTTP, its life."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.plane import plane
from harness.processes import free_port
from harness.stack import Stack, environment, stack
from harness.waiting import until
from runtime.conftest import StartFake, fake

JSON = {"Content-Type": "application/json"}
ASK = {"model": "tiny", "prompt": [20, 21, 22], "max_tokens": 8}


CHAT = {"messages": [{"role": "user", "content": "ab"}], "max_tokens": 3}
LONGEST = "a" + "é" * 254
"""The frontend makes a folder of the first name; its other characters are one each there."""
KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "plain": (("--served-model-name", "plain", "small"), {"vocab_size": 900}),
    "long": (("--served-model-name", LONGEST, "alias" * 200), {}),
    "five": ((), {"tokens_per_output": 5}),
    "chats": (("--endpoint-types", "chat", "--custom-jinja-template", "{template}"), {}),
    "text": (("--use-vllm-tokenizer",), {"vocab_size": 900}),
    "thinks": (
        ("--custom-jinja-template", "{template}", "--dyn-reasoning-parser", "deepseek_r1"),
        {"echo": True, "vocab_size": 1121},
    ),
}
"""Flags of a worker for each way to serve, and what its engine does."""


@pytest.fixture(scope="module")
def several(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All of these behind one frontend, which is not ready before there is a model."""
    with stack(tmp_path_factory.mktemp("several")) as made:
        made.start_frontend()
        until("a frontend", lambda: made.get("/live").status_code == 200)
        assert made.get("/health").status_code == 503
        template = made.folder / "short.jinja"
        template.write_text("{{ messages[-1]['content'] }}")
        for name, (flags, spec) in KINDS.items():
            words = [flag.format(template=template) for flag in flags]
            named = ("--served-model-name", name, "--component", name)
            dump = ("--dump-config-to", str(made.folder / f"{name}.json"))
            metrics = ("--prometheus-multiproc-dir", str(made.folder / "not" / "there"))
            made.start_worker(*fake(model, **spec), *named, *dump, *metrics, *words)
        yield made.wait_ready().wait_listed(*KINDS.keys() - {"long"}, "small", LONGEST, "alias" * 200)


def text_of(made: Stack, name: str, **more: Any) -> str:
    answer = made.post("/v1/completions", {**ASK, "model": name, **more})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_serves_under_each_of_its_names(several: Stack) -> None:
    assert several.get("/health").json()["status"] == "ready"
    assert text_of(several, "plain") == text_of(several, "small") == text_of(several, LONGEST)
    assert text_of(several, "alias" * 200)


def test_tokens_that_travel_together_are_the_same_answer(several: Stack) -> None:
    """The frontend finds a stop string within a message, and counts no token after it."""
    ask = {**ASK, "max_tokens": 23, "temperature": 0}
    words = text_of(several, "small", **ask | {"model": "small"}).split()
    for stop in (None, words[-5], words[-3]):
        one, five = (
            several.post("/v1/completions", {**ask, "stop": stop, "model": name}).json()
            for name in ("small", "five")
        )
        assert one["choices"] == five["choices"]
        assert one["usage"]["completion_tokens"] == five["usage"]["completion_tokens"]


def test_endpoint_types_and_a_template_limit_and_shape_what_is_answered(several: Stack) -> None:
    answer = several.post("/v1/chat/completions", {**CHAT, "model": "chats"})
    assert (answer.status_code, answer.json()["usage"]["prompt_tokens"] <= 2) == (200, True)
    assert several.post("/v1/completions", {**ASK, "model": "chats"}).status_code == 404


def test_resolved_configuration_is_dumped(several: Stack) -> None:
    found = json.loads((several.folder / "plain.json").read_text())
    assert found["options"]["served_model_name"] == ["plain", "small"]
    assert found["engine"]["context_length"] == 4096
    assert (several.folder / "not" / "there").is_dir(), "a folder for metrics is made"


def test_reasoning_parser_is_advertised_and_applied(several: Stack) -> None:
    talk = [{"role": "user", "content": "two and two</think>four"}]
    asked = {"model": "thinks", "messages": talk, "max_tokens": 100}
    message = several.post("/v1/chat/completions", asked).json()["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("four", "two and two")


@pytest.mark.parametrize(
    ("name", "prompt", "words"),
    [
        ("plain", [20, 950], "prompt: 950 is not in the vocabulary of 900 tokens"),
        ("plain", [20, 99999], "Invalid request"),
        ("text", [20, 99999], "prompt: 99999 is not in the vocabulary of 900 tokens"),
        ("text", [[20, 99999]], "prompt: 99999 is not in the vocabulary of 900 tokens"),
    ],
)
def test_unknown_ids_are_refused(several: Stack, name: str, prompt: Any, words: str) -> None:
    """By the worker with their names, unless the frontend's tokenizer does not know them either."""
    answer = several.post("/v1/completions", {**ASK, "model": name, "prompt": prompt})
    assert (answer.status_code, answer.json()["message"]) == (400, words)
    assert text_of(several, name)


def test_frontend_refuses_in_the_words_that_the_documentation_has(several: Stack) -> None:
    unread = "Failed to deserialize the JSON body into the target type: "
    for content, words in (
        ('{"model": "plain", "prompt": [20,', "EOF while parsing a value at line 1 column 33"),
        ("hello", "expected value at line 1 column 1"),
        ('{"model": "plain", "prompt": [20, -1]}', "data did not match any variant of untagged enum Prompt"),
    ):
        answer = several.post("/v1/completions", content=content, headers=JSON)
        assert answer.status_code == 400 and answer.json()["message"].startswith(unread + words)


@pytest.mark.parametrize("name", ["plain", "text"])
def test_frontend_knows_no_structural_tags(several: Stack, name: str) -> None:
    """If this fails because a newer one does: docs/requests.md, and a test of the answer over HTTP."""
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    for more, words in (
        ({"response_format": tag}, "unknown variant `structural_tag`, expected one of `text`, `json_object`"),
        ({"structured_outputs": {"structural_tag": tag}}, "Unsupported parameter(s): `structured_outputs`"),
        ({"guided_structural_tag": tag}, "Unsupported parameter(s): `guided_structural_tag`"),
        ({"nvext": {"guided_structural_tag": tag}}, "unknown field `guided_structural_tag`"),
    ):
        answer = several.post("/v1/chat/completions", {**CHAT, "model": name, **more})
        assert answer.status_code == 400 and words in answer.json()["message"]


def test_unknown_rank_is_refused_by_name_on_the_request_plane(several: Stack) -> None:
    """Over HTTP the router's rank stands; another client of the runtime may send any."""
    request = {"token_ids": [20, 21], "stop_conditions": {"max_tokens": 2}}
    bad, good = {**request, "routing": {"dp_rank": 7}}, {**request, "routing": {"dp_rank": 0}}
    with plane(environment(several.folder, DYN_TCP_RPC_HOST="127.0.0.1")) as caller:
        refused, answered = (caller.call("plain.generate", asked) for asked in (bad, good))
    assert "dp_rank: 7 is unknown" in refused["error"]
    assert sum(len(chunk["token_ids"]) for chunk in answered["chunks"]) == 2


def test_engine_failure_of_one_request_is_a_500(deployment: Stack, start_fake: StartFake) -> None:
    start_fake(fail_on_token=99)
    deployment.wait_ready()
    for stream in (False, True):
        answer = deployment.post("/v1/completions", {**ASK, "prompt": [99], "stream": stream})
        assert answer.status_code == 500
        assert "fake" not in answer.text, "nothing of the inside is told"
    assert deployment.post("/v1/completions", ASK).status_code == 200


def test_request_of_a_dead_engine_goes_on_elsewhere(deployment: Stack, start_fake: StartFake) -> None:
    start_fake(die_after=25, token_ms=5)
    deployment.wait_ready()
    undisturbed = text_of(deployment, "tiny", max_tokens=20)
    start_fake(token_ms=5)
    until("both", lambda: len(deployment.instances()) == 2)
    assert [text_of(deployment, "tiny", max_tokens=20) for _ in range(6)] == [undisturbed] * 6
    assert deployment.workers[0].process.wait(60) == 3


STICKS = """
import signal, sys, time
from pathlib import Path
from dynamo_vllm.cli import main
from dynamo_vllm.serving.lifecycle import loop_heartbeat

def stand_still(*_):  # a handler of Python's runs on the main thread, where the loop is
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)

loop_heartbeat.MAX_MISSED = 3
signal.signal(signal.SIGUSR1, stand_still)
main.main(sys.argv[2:])
"""


def test_worker_whose_loop_stands_still_is_not_alive(deployment: Stack, model: Path, tmp_path: Path) -> None:
    port, goes_on = free_port(), tmp_path / "goes-on"
    flags = ["--model", str(model), "--engine", "fake", "--system-port", str(port)]
    log = tmp_path / "sticks.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", STICKS, goes_on, "worker", *flags],
            env=deployment.environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    worker = deployment.add(process, port, log)
    deployment.wait_ready()

    def live() -> httpx.Response:
        return httpx.get(f"{worker.system_url}/live", timeout=5)

    assert live().status_code == 200
    worker.signal(signal.SIGUSR1)
    until("a stuck worker", lambda: live().status_code == 503)
    assert "event loop has been blocked" in live().text
    assert not worker.is_ready()
    goes_on.touch()
    until("its return", lambda: live().status_code == 200 and worker.is_ready())


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--engine", "fake", "--fake-engine", '{"refuse_start": true}'], 1, "set not to start"),
        (["--engine", "fake", "--model", "/no/such/folder"], 1, "/no/such/folder"),
        (["--omni", "--connector", "nixl"], 2, "cannot be combined with --omni"),
        (["--served-model-name", f"{LONGEST}é"], 2, "has 256 characters, and frontends take 255"),
        (["--tool-call-parser", "hermse"], 2, "hermse is unknown to the frontend; nearest: hermes"),
        (["--reasoning-parser", "qwen-3"], 2, "nearest: qwen3"),
    ],
)
def test_refused_start(tmp_path: Path, model: Path, flags: list[str], code: int, said: str) -> None:
    with stack(tmp_path) as made:
        worker = made.start_worker("--model", str(model), *flags)
        assert worker.process.wait(60) == code
    lines = [line for line in worker.log.read_text().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and said in lines[0]


def test_failed_start_leaves_its_configuration_without_secrets(start_fake: StartFake, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    worker = start_fake("--dump-config-to", str(file), "--admin-token", "sesame", refuse_start=True)
    assert worker.process.wait(60) == 1
    found = json.loads(file.read_text())
    assert found["options"]["served_model_name"] == ["tiny"] and "engine" not in found
    assert "sesame" not in file.read_text()


def test_worker_is_not_ready_before_each_of_its_ranks_has_answered(
    deployment: Stack, start_fake: StartFake
) -> None:
    worker = start_fake(ranks=2, stall_rank=1)
    running = "dynamo_component_requests_running"
    until("the second rank's turn", lambda: worker.health() and worker.metric(running, dp_rank=1) == 1)
    assert not worker.is_ready()
    assert "registering" not in worker.log.read_text()


def test_probe_of_the_runtime_answers_for_health(model: Path, tmp_path: Path) -> None:
    """Nobody asks but the probe: the engine hangs after some tokens, the first is of the warm-up."""
    told = ("--runtime-health-check", "--health-seconds", "600", "--canary-timeout-seconds", "0.5")
    fake = ("--engine", "fake", "--fake-engine", '{"stall_after": 7}')
    with stack(tmp_path, DYN_CANARY_WAIT_TIME="1", DYN_HEALTH_CHECK_REQUEST_TIMEOUT="1") as made:
        worker = made.start_worker("--model", str(model), *fake, *told)
        until("a probe that passed", worker.is_ready)
        until("one that did not", lambda: worker.health() == 503)
        until("its end", lambda: worker.metric("dynamo_component_requests_in_flight") == 0)
        worker.signal(signal.SIGTERM)
        assert worker.process.wait(60) == 0


def test_prompt_above_the_busy_threshold_is_529(tmp_path: Path, model: Path) -> None:
    """What the docs say the frontend answers."""
    with stack(tmp_path) as made:
        made.start_frontend("--busy-prefill-tokens", "10")
        made.start_worker(*fake(model, stall_on_token=99))
        made.wait_ready()
        body = {**ASK, "prompt": [99] * 200, "stream": True}

        def wait_for_ever() -> None:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{made.url}/v1/completions", json=body, timeout=120)

        threading.Thread(target=wait_for_ever, daemon=True).start()
        until("a refusal", lambda: made.post("/v1/completions", ASK).status_code != 200)
        assert made.post("/v1/completions", ASK).status_code == 529
