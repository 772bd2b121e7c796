"""Rankings, scores, embeddings and transcripts through Envoy, the control app and workers."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import Batch

from dynamo_vllm.gateway.apis.transcription import FILE_BYTES
from dynamo_vllm.gateway.store.keys import Scopes
from harness import processes
from harness.controlled import HOSTS
from harness.fuzz_bodies import OF_WORKERS
from harness.fuzz_odd import as_json, mutated
from harness.gateway_alone import FIXED, Running, in_front_of
from harness.stack import Stack, Worker, stack
from harness.waiting import until
from runtime.conftest import fake

STALLS = "~"
"""A text that begins with it is never answered by a worker that stalls."""
Body = dict[str, Any]


def start(made: Stack, model: Path, name: str, **spec: Any) -> Worker:
    """A worker with the fake engine; each model has its own component, as `serve` gives it."""
    mode = ("--disaggregation-mode", "pooling") if "pooling" in spec else ()
    return made.start_worker(*fake(model, **spec), "--served-model-name", name, "--component", name, *mode)


@pytest.fixture(scope="module")
def running(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stack(tmp_path_factory.mktemp("stack")) as made:
        made.start_frontend()
        start(made, model, "embedder", pooling="embed", stall_on_token=ord(STALLS))
        start(made, model, "ranker", pooling="classify")
        start(made, model, "tiny")
        yield made.wait_ready().wait_listed("embedder", "ranker", "tiny")


@pytest.fixture(scope="module")
def gate(running: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    discovery = running.environment()["DYN_FILE_KV"]
    with in_front_of(running.url, tmp_path_factory.mktemp("gateway"), DYN_FILE_KV=discovery) as made:
        yield made


@pytest.fixture(scope="module")
def speech(running: Stack, gate: Running) -> Iterator[Path]:
    """The notes of a worker for speech, which the gateway knows."""
    with transcriber(running, "whisper") as notes:
        until("whisper", lambda: "whisper" in names(gate))
        yield notes


@contextlib.contextmanager
def transcriber(running: Stack, name: str) -> Iterator[Path]:
    """The notes of a worker for speech, which runs while the context is open."""
    notes = running.folder / f"{name}.notes"
    words = [sys.executable, "-m", "harness.transcriber", name, str(notes)]
    env = running.environment(PYTHONPATH=":".join(sys.path), DYN_TCP_MAX_MESSAGE_SIZE=str(64 << 20))
    env |= dict.fromkeys(HOSTS, "127.0.0.1")
    process = processes.start(name, words, running.folder / f"{name}.log", env)
    try:
        processes.wait_until("started", [process], lambda: "started" in noted(notes), 60)
        yield notes
    finally:
        process.kill()


def noted(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def names(gate: Running) -> list[str]:
    return [one["id"] for one in gate.get("/v1/models").json()["data"]]


def is_known(gate: Running, name: str) -> bool:
    """Whether the gateway knows a worker of the model; the frontend may list it a moment before."""
    return any(one["id"] == name and "kind" in one for one in gate.get("/v1/models").json()["data"])


def error(reply: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = reply.json()["error"]
    return found


def booked(gate: Running, request_id: str) -> tuple[int, int] | None:
    """Prompt and all tokens of a request in the ledger."""
    sql = (
        "SELECT SUM(prompt_tokens), SUM(total_tokens) FROM gateway_usage_parts WHERE request_id = ?"
        " HAVING COUNT(*) > 0"
    )
    found = gate.database.run_now(lambda t: t.one(sql, request_id))
    return None if found is None else (int(found[0]), int(found[1]))


# --- pairs ------------------------------------------------------------------------------------------------


def test_ranking_has_three_paths(gate: Running) -> None:
    """test_search_clients.py asks as clients do."""
    asked: Body = {"model": "ranker", "query": "abc", "documents": ["xyz", "abc", {"text": "abx"}]}
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        found = gate.ask(path=path, **asked, top_n=2).json()
        assert [one["index"] for one in found["results"]] == [1, 2]
        assert found["results"][0]["relevance_score"] == 1.0
    assert found["meta"]["tokens"]["input_tokens"] == 3 * 7


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
def test_scores_are_in_order(gate: Running, path: str) -> None:
    found = gate.ask(path=path, model="ranker", text_1="abc", text_2=["xyz", "abc"]).json()
    assert [one["score"] for one in found["data"]] == [0.0, 1.0]
    each = gate.ask(path=path, model="embedder", queries=["a", "b"], items=["a", "c"]).json()
    assert [one["score"] for one in each["data"]] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("path", "body", "status", "parameter"),
    [
        ("/v1/rerank", {"model": "ranker", "query": "a"}, 400, "documents"),
        ("/v1/score", {"model": "ranker", "text_1": "a" * 5000, "text_2": "a"}, 400, "text_2[0]"),
        ("/v1/score", {"model": "tiny", "text_1": "a", "text_2": "a"}, 400, "model"),
        ("/v1/score", {"model": "nobody", "text_1": "a", "text_2": "a"}, 404, "model"),
        ("/v2/embed", {"model": "embedder", "texts": ["a"], "output_dimension": 9}, 400, "dimensions"),
    ],
)
def test_bad_request_is_refused_with_its_field(
    gate: Running, path: str, body: Body, status: int, parameter: str
) -> None:
    found = gate.ask(path=path, **body)
    assert (found.status_code, error(found)["param"]) == (status, parameter), found.text
    assert parameter.partition("[")[0] in error(found)["message"]


ODD_BODIES = st.sampled_from(sorted(OF_WORKERS)).flatmap(
    lambda path: st.tuples(st.just(path), as_json(mutated(OF_WORKERS[path])))
)


def test_odd_bodies_are_answered(gate: Running) -> None:
    headers = {"x-api-key": FIXED, "content-type": "application/json"}
    odd: list[str] = []

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ODD_BODIES)
    def each(asked: tuple[str, bytes]) -> None:
        path, body = asked
        found = gate.client.post(gate.url + path, content=body, headers=headers)
        if found.status_code not in (200, 400, 404) or (not found.is_success and "message" not in found.text):
            odd.append(f"{path} {body[:300]!r} {found.status_code} {found.text[:300]}")

    each()
    assert odd == []


# --- embeddings -------------------------------------------------------------------------------------------


def test_embeddings_are_the_same_in_every_way(gate: Running) -> None:
    listed = gate.ask(path="/v1/embeddings", model="embedder", input=["abc"]).json()
    asked: Body = {"model": "embedder", "messages": [{"role": "user", "content": "abc"}]}
    chat = gate.ask(path="/v1/embeddings", **asked).json()
    cohere = gate.ask(path="/v2/embed", model="embedder", texts=["abc"], input_type="search_query").json()
    plain = pytest.approx(listed["data"][0]["embedding"])  # numbers with other digits
    assert chat["data"][0]["embedding"] == plain and cohere["embeddings"]["float"][0] == plain
    assert chat["usage"]["prompt_tokens"] == 3


def test_worker_gets_fields_that_the_frontend_would_drop(gate: Running) -> None:
    cut = gate.ask(path="/v1/embeddings", model="embedder", input="abcdef", truncate_prompt_tokens=2).json()
    assert cut["usage"]["prompt_tokens"] == 2


def test_long_list_comes_in_pieces(gate: Running) -> None:
    texts = [f"{number:04}" for number in range(2000)]
    found = gate.ask(path="/v2/embed", model="embedder", texts=texts).json()
    assert len(found["embeddings"]["float"]) == 2000
    assert found["meta"]["tokens"]["input_tokens"] == 8000


# --- who pays, who may ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"model": "ranker", "query": "abc", "documents": ["a", "bc"]}),
        ("/v1/score", {"model": "embedder", "text_1": "abc", "text_2": ["a", "bc"]}),
        ("/v1/embeddings", {"model": "embedder", "messages": [{"role": "user", "content": "abc"}]}),
        ("/v1/embeddings", {"model": "embedder", "input": ["abc", "d"]}),
    ],
)
def test_tokens_booked_are_those_of_the_answer(gate: Running, path: str, body: Body) -> None:
    found = gate.ask(path=path, **body)
    usage, request_id = found.json()["usage"], found.headers["x-request-id"]
    until("the record", lambda: booked(gate, request_id) is not None)
    assert booked(gate, request_id) == (usage["prompt_tokens"], usage["total_tokens"])


def test_key_for_other_models_or_endpoints_is_refused(gate: Running) -> None:
    secret = gate.secret("scorer", scopes=Scopes(models=("ranker",), endpoints=("score", "rerank")))
    scored: Body = {"model": "ranker", "text_1": "a", "text_2": "b"}
    assert gate.ask(secret, "/v1/score", **scored).status_code == 200
    assert gate.ask(secret, "/score", **{**scored, "model": "embedder"}).status_code == 403
    ranked: Body = {"model": "ranker", "query": "a", "documents": ["a"]}
    assert gate.ask(secret, "/v2/rerank", **ranked).status_code == 200
    assert gate.ask(secret, "/v2/embed", model="ranker", texts=["a"]).status_code == 403


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"model": "embedder", "input": ["abc"]}, "data"),
        ("/v1/rerank", {"model": "ranker", "query": "abc", "documents": ["a", "bc"]}, "results"),
        ("/v1/score", {"model": "ranker", "text_1": "abc", "text_2": ["a", "bc"]}, "data"),
    ],
)
def test_batch_has_lines_for_workers(gate: Running, path: str, body: Body, field: str) -> None:
    broken = {"model": body["model"]}
    lines = [
        {"custom_id": str(number), "method": "POST", "url": path, "body": one}
        for number, one in enumerate([body, broken])
    ]
    with openai.OpenAI(base_url=f"{gate.url}/v1", api_key=FIXED, max_retries=0, timeout=60) as client:
        file = "\n".join(map(json.dumps, lines)).encode()
        given = client.files.create(file=("lines.jsonl", file), purpose="batch")
        made = client.post(
            "/batches",
            body={"input_file_id": given.id, "endpoint": path, "completion_window": "24h"},
            cast_to=Batch,
        )
        until("the batch", lambda: client.batches.retrieve(made.id).status == "completed")
        done = client.batches.retrieve(made.id)
        assert done.output_file_id is not None and done.error_file_id is not None
        found = json.loads(client.files.content(done.output_file_id).text)["response"]
        refused = json.loads(client.files.content(done.error_file_id).text)["response"]
    assert found["body"][field] and found["body"]["usage"]["prompt_tokens"] > 0
    assert 400 <= refused["status_code"] < 500 and refused["body"]["error"]["message"]
    tokens = found["body"]["usage"]["prompt_tokens"], found["body"]["usage"]["total_tokens"]
    until("the record", lambda: booked(gate, found["request_id"]) == tokens)


# --- workers that go --------------------------------------------------------------------------------------


def in_flight(worker: Worker) -> int:
    found: int = worker.admin("status").json()["in_flight"]
    return found


async def leave(gate: Running, has_begun: Callable[[], bool], path: str, **sent: Any) -> None:
    """Send a request, and go away once it has begun."""
    async with httpx.AsyncClient(timeout=60, headers={"x-api-key": FIXED}) as client:
        asking = asyncio.create_task(client.post(gate.url + path, **sent))
        await asyncio.to_thread(until, "the request to begin", has_begun)
        assert not asking.done()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


def test_killed_worker_is_replaced_by_another(gate: Running, running: Stack, model: Path) -> None:
    first = start(running, model, "pair", pooling="classify", stall_on_token=ord(STALLS))
    until("the first", lambda: is_known(gate, "pair"))
    with ThreadPoolExecutor(1) as pool:
        body: Body = {"model": "pair", "text_1": STALLS, "text_2": [STALLS]}
        asking = pool.submit(gate.ask, path="/v1/score", **body)
        until("it has the request", lambda: in_flight(first) == 1)
        second = start(running, model, "pair", pooling="classify")
        until("the second", lambda: second.is_ready() and components(running).count("pair") == 2)
        assert gate.ask(path="/v1/score", model="pair", text_1="a", text_2="a").status_code == 200
        first.signal(signal.SIGKILL)
        found = asking.result(60)
    running.workers.remove(first)
    assert found.status_code == 200, found.text
    assert found.json()["data"][0]["score"] == 1.0
    again = [gate.ask(path="/v1/score", model="pair", text_1="a", text_2="a") for _ in range(4)]
    assert {one.status_code for one in again} == {200}, "discovery may still have the first"


def components(running: Stack) -> list[str]:
    return [instance["component"] for instance in running.instances()]


def test_worker_ends_what_a_client_left(gate: Running, running: Stack) -> None:
    worker = running.workers[0]
    body = {"model": "embedder", "text_1": STALLS, "text_2": ["a"]}
    asyncio.run(leave(gate, lambda: in_flight(worker) == 1, "/v1/score", json=body))
    until("it has ended it", lambda: in_flight(worker) == 0)


# --- models -----------------------------------------------------------------------------------------------


def test_models_say_what_they_are_for(gate: Running, speech: Path) -> None:
    found = {one["id"]: one for one in gate.get("/v1/models").json()["data"]}
    assert found["tiny"]["kind"] == "generate" and "chat" in found["tiny"]["apis"]
    assert found["embedder"]["dimensions"] == 8 and "embeddings" in found["embedder"]["apis"]
    assert {"classify", "rerank", "score"} <= set(found["ranker"]["apis"])
    assert found["whisper"]["apis"] == ["transcriptions"]
    for name in ("whisper", "ranker"):
        # The frontend (1.6.1) says the time of the question.
        assert {**gate.get(f"/v1/models/{name}").json(), "created": 0} == {**found[name], "created": 0}
    assert gate.get("/v1/models/nobody").status_code == 404
    assert gate.get("/v1/models/tiny/ready").json()["ready"] is True


# --- speech -----------------------------------------------------------------------------------------------


@pytest.fixture
def client(gate: Running, speech: Path) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{gate.url}/v1", api_key=FIXED, max_retries=0, timeout=60) as made:
        yield made


def sound(size: int = 100) -> tuple[str, io.BytesIO]:
    return "speech.wav", io.BytesIO(b"a" * size)


def test_transcript_has_the_format_that_was_named(client: openai.OpenAI) -> None:
    create = client.audio.transcriptions.create
    plain = create(model="whisper", file=sound())
    assert plain.text == "100 bytes one two"
    assert plain.usage is not None and plain.usage.type == "tokens" and plain.usage.total_tokens == 6
    subtitles = create(model="whisper", file=sound(), response_format="srt")
    assert "00:00:01,500 --> 00:00:02,500\ntwo" in subtitles
    verbose = create(
        model="whisper",
        file=sound(),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert (verbose.language, verbose.duration) == ("de", 2.5)
    assert verbose.words is not None and [one.word for one in verbose.words] == ["one", "two"]
    assert verbose.segments is not None and verbose.segments[1].end == 2.5


def test_transcript_streams(client: openai.OpenAI) -> None:
    events = list(client.audio.transcriptions.create(model="whisper", file=sound(), stream=True))
    assert [event.type for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    last = events[-1]
    assert last.type == "transcript.text.done" and last.text == "100 bytes one two"
    assert last.usage is not None and last.usage.output_tokens == 2


def test_largest_file_reaches_the_worker(gate: Running, speech: Path) -> None:
    made = upload(gate, size=FILE_BYTES, path="/v1/audio/translations")
    assert made.json()["text"] == f"{FILE_BYTES} bytes one two"


def upload(
    gate: Running,
    secret: str = FIXED,
    size: int = 9,
    path: str = "/v1/audio/transcriptions",
    **fields: Any,
) -> httpx.Response:
    return gate.client.post(
        gate.url + path,
        data={"model": "whisper", **fields},
        files={"file": sound(size)},
        headers={"authorization": f"Bearer {secret}"},
    )


@pytest.mark.parametrize(
    ("fields", "status", "parameter"),
    [
        ({"model": ""}, 400, "model"),
        ({"model": "nobody"}, 404, "model"),
        ({"model": "tiny"}, 400, "model"),
        ({"response_format": "xml"}, 400, "response_format"),
        ({"response_format": "srt", "stream": "true"}, 400, "response_format"),
        ({"stream": "maybe"}, 400, "stream"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"temperature": "1.5"}, 400, "temperature"),
        ({"timestamp_granularities[]": "word"}, 400, "timestamp_granularities"),
        ({"prompt": "refuse"}, 400, "file"),
        ({"size": 0}, 400, "file"),
        ({"size": FILE_BYTES + 1}, 413, None),
        ({"size": FILE_BYTES + (1 << 20)}, 413, None),
    ],
)
def test_bad_upload_is_refused_with_its_field(
    gate: Running, speech: Path, fields: dict[str, Any], status: int, parameter: str | None
) -> None:
    found = upload(gate, **fields)
    assert (found.status_code, error(found)["param"]) == (status, parameter), found.text


def test_worker_for_speech_knows_who_pays(gate: Running, speech: Path) -> None:
    request_id = upload(gate, prompt="paid").headers["x-request-id"]
    assert f"begun paid {request_id} flag-" in noted(speech)


@pytest.mark.parametrize("stream", ["true", "false"])
def test_speech_that_a_client_left_ends(gate: Running, speech: Path, stream: str) -> None:
    begun, stopped = (noted(speech).count(word) for word in ("begun wait", "stopped"))
    sent = {"data": {"model": "whisper", "prompt": "wait", "stream": stream}, "files": {"file": sound()}}
    has_begun = lambda: noted(speech).count("begun wait") == begun + 1  # noqa: E731
    asyncio.run(leave(gate, has_begun, "/v1/audio/transcriptions", **sent))
    until("it has stopped", lambda: noted(speech).count("stopped") == stopped + 1)
