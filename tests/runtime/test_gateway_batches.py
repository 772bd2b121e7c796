"""/v1/files and /v1/batches in front of a real frontend, asked with OpenAI's SDK."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.applications import Starlette

from dynamo_vllm.gateway.batches.routes import Batches
from dynamo_vllm.gateway.batches.store import BatchStore
from harness import gateway_store
from harness.gateways import Gateway, gateway
from harness.open_gate import OpenGate
from harness.servers import postgres
from harness.stack import Stack
from harness.waiting import until

pytestmark = pytest.mark.more

MODEL = "demo-chat"
CHAT = "/v1/chat/completions"
STORE = BatchStore(stale_seconds=10)
SETTINGS = {"beat_seconds": 0.2, "concurrency": 8, "file_bytes": 2_000_000, "tenant_bytes": 20_000_000}


@pytest.fixture(scope="module")
def gate(talking: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(talking.url, tmp_path_factory.mktemp("gateway"), batches=SETTINGS) as made:
        yield made


@pytest.fixture(scope="module")
def client(gate: Gateway) -> openai.OpenAI:
    return gate.client()


def line(number: int, url: str = CHAT, **body: Any) -> str:
    given = {"model": MODEL, "messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 2}
    whole = {"custom_id": f"c{number}", "method": "POST", "url": url, "body": body or given}
    return json.dumps(whole) + "\n"


def upload(client: openai.OpenAI, text: str) -> str:
    return client.files.create(file=("in.jsonl", io.BytesIO(text.encode())), purpose="batch").id


def begin(client: openai.OpenAI, text: str, endpoint: str = CHAT) -> Any:
    create: Any = client.batches.create
    return create(input_file_id=upload(client, text), endpoint=endpoint, completion_window="24h")


def ended(client: openai.OpenAI, batch_id: str, seconds: float = 120) -> Any:
    states: list[Any] = []

    def has_ended() -> bool:
        states.append(client.batches.retrieve(batch_id))
        return states[-1].status in ("completed", "failed", "expired", "cancelled")

    until("the batch to end", has_ended, seconds)
    return states[-1]


def completed(client: openai.OpenAI, batch_id: str) -> int:
    found: Any = client.batches.retrieve(batch_id)
    count: int = found.request_counts.completed
    return count


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(one) for one in client.files.content(file_id).text.splitlines()]


def test_batch_of_chats_is_answered_in_order(client: openai.OpenAI) -> None:
    made = begin(client, "".join(line(n) for n in range(50)))
    assert made.status == "validating"
    found = ended(client, made.id)
    assert (found.status, found.error_file_id) == ("completed", None)
    assert found.request_counts.to_dict() == {"total": 50, "completed": 50, "failed": 0}
    answers = lines_of(client, found.output_file_id)
    assert [one["custom_id"] for one in answers] == [f"c{n}" for n in range(50)]
    usages = [one["response"]["body"]["usage"] for one in answers]
    assert found.usage.input_tokens == sum(usage["prompt_tokens"] for usage in usages)
    assert found.usage.output_tokens == 100
    assert len({one["id"] for one in answers}) == 50


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/completions", {"model": MODEL, "prompt": "hello", "max_tokens": 2}),
        ("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 2, "store": True}),
    ],
)
def test_other_endpoints(client: openai.OpenAI, endpoint: str, body: dict[str, Any]) -> None:
    found = ended(client, begin(client, line(1, endpoint, **body), endpoint).id)
    (answer,) = lines_of(client, found.output_file_id)
    assert (found.usage.output_tokens, answer["response"]["status_code"]) == (2, 200)
    if endpoint == "/v1/responses":
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer["response"]["body"]["id"])


def test_lines_that_the_frontend_refuses_are_in_the_error_file(client: openai.OpenAI) -> None:
    bad = line(1, model="nobody", messages=[{"role": "user", "content": "hello"}])
    found = ended(client, begin(client, line(0) + bad + line(2)).id)
    assert found.status == "completed"
    assert found.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    (error,) = lines_of(client, found.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("c1", 404)
    assert error["response"]["body"]["error"]["message"] == "Model not found"
    assert [one["custom_id"] for one in lines_of(client, found.output_file_id)] == ["c0", "c2"]


def test_file_with_bad_lines_fails_before_the_first_is_run(client: openai.OpenAI) -> None:
    found = ended(client, begin(client, line(0) + "{nonsense\n").id)
    assert (found.status, found.output_file_id) == ("failed", None)
    assert [(one.line, one.code) for one in found.errors.data] == [(2, "invalid_json_line")]


def test_files_are_listed_and_deleted(gate: Gateway) -> None:
    client = gate.client("files")
    ids = [upload(client, line(n)) for n in range(5)]
    assert [one.id for one in client.files.list(limit=2)] == ids[::-1]
    assert [one.id for one in client.files.list(order="asc", limit=3)] == ids
    assert client.files.retrieve(ids[0]).bytes == len(line(0))
    assert client.files.content(ids[0]).text == line(0)
    assert client.files.delete(ids[0]).deleted
    assert not (gate.folder / "files" / ids[0]).exists()
    with pytest.raises(openai.NotFoundError):
        client.files.content(ids[0])


def test_other_tenants_find_nothing(gate: Gateway, client: openai.OpenAI) -> None:
    other, file_id = gate.client("b"), upload(client, line(0))
    batch = begin(client, line(0))
    ended(client, batch.id)
    for ask_for in (
        lambda: other.files.retrieve(file_id),
        lambda: other.files.content(file_id),
        lambda: other.files.delete(file_id),
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.batches.create(
            input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask_for()
    assert (other.files.list().data, other.batches.list().data) == ([], [])


def test_odd_batches_and_forms_are_refused(gate: Gateway, client: openai.OpenAI) -> None:
    create: Any = client.batches.create
    given = {"input_file_id": upload(client, line(0)), "endpoint": CHAT, "completion_window": "24h"}
    for more in ({"endpoint": "/v1/audio/speech"}, {"completion_window": "999h"}):
        with pytest.raises(openai.BadRequestError):
            create(**{**given, **more})
    for form in (
        {"json": {"purpose": "batch"}},
        {"files": {"file": b"x"}},
        {"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}},
        {"content": b"nonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}},
    ):
        found = httpx.post(f"{gate.url}/v1/files", timeout=30, **form)
        assert found.status_code == 400 and found.json()["error"]["message"], found.text


def long_lines(count: int, tokens: int) -> str:
    chat = [{"role": "user", "content": "hello"}]
    return "".join(line(n, model=MODEL, messages=chat, max_tokens=tokens) for n in range(1000, 1000 + count))


def test_cancelled_batch_keeps_what_was_answered(client: openai.OpenAI, talking: Stack) -> None:
    made = begin(client, "".join(line(n) for n in range(20)) + long_lines(40, 3000))
    until("the short ones", lambda: completed(client, made.id) >= 20)
    with pytest.raises(openai.ConflictError):
        client.files.delete(made.input_file_id)
    assert client.batches.cancel(made.id).status == "cancelling"
    found = ended(client, made.id)
    assert (found.status, found.cancelled_at is not None) == ("cancelled", True)
    answers = lines_of(client, found.output_file_id)
    assert len(answers) == found.request_counts.completed < 60
    until("the engine is idle", lambda: talking.workers[0].admin("status").json()["in_flight"] == 0)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(begin_and_end(client))


def begin_and_end(client: openai.OpenAI) -> str:
    return str(ended(client, begin(client, line(0)).id).id)


def test_every_line_is_answered_once_when_gateways_are_killed_and_others_take_over(
    talking: Stack, tmp_path: Path
) -> None:
    count = 3000
    with gateway(talking.url, tmp_path, batches={**SETTINGS, "concurrency": 16}) as mine:
        client = mine.client()
        made = begin(client, "".join(line(n) for n in range(count)))
        for least in (300, 1200):
            until(f"{least} lines", lambda least=least: completed(client, made.id) > least)  # type: ignore[misc]
            mine.kill()
            mine.start()
        with gateway(talking.url, tmp_path, batches=SETTINGS) as other:
            until("2000 lines", lambda: completed(client, made.id) > 2000)
            mine.kill()
            client = other.client()
            found = ended(client, made.id)
            assert found.status == "completed"
            assert found.request_counts.to_dict() == {"total": count, "completed": count, "failed": 0}
            answers = lines_of(client, found.output_file_id)
        assert [one["custom_id"] for one in answers] == [f"c{n}" for n in range(count)]
        assert found.usage.output_tokens == 2 * count
        assert not list((tmp_path / "parts").iterdir())


def test_interactive_requests_are_answered_during_a_batch(client: openai.OpenAI, talking: Stack) -> None:
    made = begin(client, long_lines(40, 3500))
    until("the batch to run", lambda: client.batches.retrieve(made.id).status == "in_progress")
    create: Any = talking.openai.completions.create
    assert all(create(model=MODEL, prompt="hello", max_tokens=5).choices for _ in range(20))
    assert client.batches.retrieve(made.id).status == "in_progress"
    client.batches.cancel(made.id)
    ended(client, made.id)


async def test_files_and_batches_in_postgres(tmp_path: Path) -> None:
    """What unit tests show in SQLite: turns, room for uploads, counts of failures, texts with NUL."""
    pytest.importorskip("psycopg")
    answer = httpx.MockTransport(lambda request: httpx.Response(200, json={"id": "x"}))
    with (
        postgres(tmp_path / "postgres") as server,
        contextlib.closing(gateway_store.opened(server.url)) as database,
    ):
        frontend = httpx.AsyncClient(transport=answer, base_url="http://frontend")
        batches = Batches(database, frontend, tmp_path, OpenGate(), beat_seconds=0.1)
        batches.start()
        transport = httpx.ASGITransport(Starlette(routes=batches.routes()))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            replies = [await begun(client, tenant) for tenant in "aab"]
            for tenant, batch_id in zip("aab", replies, strict=True):
                async with asyncio.timeout(60):
                    while (await shown(client, tenant, batch_id))["status"] != "completed":
                        await asyncio.sleep(0.05)
            for path in ("/v1/files?after=%00", "/v1/batches/%00", "/v1/files/%00"):
                assert (await client.get(path, headers={"x-gateway-tenant": "a"})).status_code == 404
        await batches.sweep()
        await batches.close()
        failures = [await database.run(lambda t: STORE.note_failure(t, "b", "defect")) for _ in range(2)]
        await database.run(
            lambda t: t.execute("UPDATE gateway_batches SET ended = NULL, status = 'in_progress'")
        )
        waiting = await database.run(lambda t: STORE.waiting(t, 1))
        await database.run(lambda t: t.execute("UPDATE gateway_batches SET expires = 1"))
        over = await database.run(lambda t: STORE.waiting(t, 1))
    assert failures == [1, 2]
    assert sorted((batch.tenant, batch.is_over) for batch in waiting) == [("a", False), ("b", False)]
    assert sorted((batch.tenant, batch.is_over) for batch in over) == [("a", True), ("a", True), ("b", True)]


async def begun(client: httpx.AsyncClient, tenant: str) -> str:
    headers = {"x-gateway-tenant": tenant, "x-gateway-key": tenant}
    form = {"file": ("a\0b", line(0).encode())}
    file = await client.post("/v1/files", headers=headers, files=form, data={"purpose": "batch"})
    new = {"input_file_id": file.json()["id"], "endpoint": CHAT, "metadata": {"a": "\0"}}
    reply = await client.post("/v1/batches", headers=headers, json=new)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["id"])


async def shown(client: httpx.AsyncClient, tenant: str, batch_id: str) -> Any:
    return (await client.get(f"/v1/batches/{batch_id}", headers={"x-gateway-tenant": tenant})).json()
