"""A chat, an embedding and a rerank model in one `serve`, which starts a gateway for them by itself."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from harness.processes import COMMAND
from harness.served import Serving, own_environment, served
from harness.several_kinds import groups, sound

pytestmark = pytest.mark.more


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("search")
    file = groups(folder, "chat", "vectors", "ranker", "hears")
    with served(folder, "--config", str(file)) as made:
        yield made


def command(running: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    env = own_environment(running.output.parent)
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, env=env, timeout=120)


def post(running: Serving, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{running.url}{path}", json=body, timeout=30)


def test_gateway_without_keys_is_started_and_said(running: Serving) -> None:
    said = running.process.written()
    assert said.count("a gateway without keys is started for ranker, hears") == 1
    assert "model=chat,vectors(embeddings),ranker(rerank),hears(transcription) workers=4" in said


def test_every_model_says_what_it_is_for(running: Serving) -> None:
    listed = httpx.get(f"{running.url}/v1/models", timeout=30).json()["data"]
    assert {one["id"]: one["kind"] for one in listed} == {
        "chat": "generate",
        "vectors": "pooling",
        "ranker": "pooling",
        "hears": "transcription",
    }


def test_apis_of_the_gateway_need_no_key(running: Serving) -> None:
    ranked = post(running, "/v1/rerank", model="ranker", query="abc", documents=["xyz", "abc"])
    assert [one["index"] for one in ranked.json()["results"]] == [1, 0]
    scored = post(running, "/v1/score", model="ranker", text_1="abc", text_2=["abc", "xyz"])
    assert scored.json()["data"][0]["score"] > scored.json()["data"][1]["score"]


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer anything"}])
def test_apis_of_the_frontend_go_on_as_before(running: Serving, headers: dict[str, str]) -> None:
    body = {"model": "chat", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert reply.json()["choices"][0]["message"]["content"]
    for path in ("/metrics", "/instances", "/health"):
        assert httpx.get(running.url + path, timeout=30).status_code == 200


def test_speech_is_written_down(running: Serving) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none") as client:
        found = client.audio.transcriptions.create(model="hears", file=("a.wav", sound()))
    assert found.text


def test_nothing_is_booked_for_nobody(running: Serving) -> None:
    assert not list(running.output.parent.rglob("*.usage"))


def test_search_asks_all_three(running: Serving, tmp_path: Path) -> None:
    (tmp_path / "adapters.md").write_text("# LoRA adapters\n\nAn adapter is loaded at run time.\n")
    (tmp_path / "sea.md").write_text("# Zulu\n\nJumpy vex, fuzzy pub!\n")
    found = command(running, "search", running.url, "Which adapter is loaded?", "--folder", str(tmp_path))
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[2] == "adapters.md"
    assert "embeddings by vectors, reranking by ranker" in found.stdout and "\nchat: " in found.stdout


def test_commands_of_this_machine_find_the_gateway(running: Serving) -> None:
    shown = command(running, "status")
    assert running.url in shown.stdout and shown.stdout.count("pooling") == 2
    assert "transcription" in shown.stdout
    refused = command(running, "chat", "--message", "Hello", "--model", "ranker")
    assert refused.returncode == 1 and "ranker does not chat" in refused.stderr
    assert command(running, "chat", "--message", "Hello").stdout.strip()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vectors", "a vector of 997 numbers"),
        ("ranker", "a ranking from /v1/rerank"),
        ("hears", "a transcript"),
    ],
)
def test_check_proves_models_that_do_not_generate(running: Serving, name: str, words: str) -> None:
    found = command(running, "check", "--live", running.url, "--model", name)
    assert found.returncode == 0 and words in found.stdout, found.stdout


def test_gateway_can_be_left_out(tmp_path: Path) -> None:
    file = groups(tmp_path, "vectors", "ranker")
    with served(tmp_path, "--config", str(file), "--no-gateway") as made:
        assert "envoy: " not in made.process.written()
        ranked = post(made, "/v1/rerank", model="ranker", query="abc", documents=["xyz", "abc"])
        assert [one["index"] for one in ranked.json()] == [1, 0]  # the frontend's own shape
        found = command(made, "check", "--live", made.url, "--model", "ranker")
        assert "a ranking from /v1/rerank" in found.stdout
        assert made.stop() == []


def test_without_envoy_everything_else_is_served(tmp_path: Path) -> None:
    file = groups(tmp_path, "vectors", "ranker")
    env = {**own_environment(tmp_path), "DYN_VLLM_ENVOY": "/no/such/envoy"}
    with served(tmp_path, "--config", str(file), env=env) as made:
        (line,) = [line for line in made.process.written().splitlines() if "need the gateway" in line]
        assert line.startswith("ranker: /v1/score")
        assert post(made, "/v1/embeddings", model="vectors", input="a").status_code == 200
