"""/v1/responses with history, in front of a real frontend, asked with OpenAI's SDK."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from dynamo_vllm.gateway.database import Transaction
from harness.gateways import Gateway, gateway
from harness.responses_app import PATH, App, app
from harness.servers import Server, postgres
from harness.stack import Stack
from harness.waiting import until

MODEL = "demo-chat"


@pytest.fixture(scope="module")
def gate(talking: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(talking.url, folder, responses={"beat_seconds": 0.2}) as made:
        yield made


@pytest.fixture(scope="module")
def client(gate: Gateway) -> openai.OpenAI:
    return gate.client()


def ask(client: openai.OpenAI, text: Any, **more: Any) -> Any:
    create: Any = client.responses.create
    return create(input=text, **{"model": MODEL, "max_output_tokens": 4, **more})


def whole(talking: Stack, items: list[Any], **more: Any) -> int:
    """The tokens of a prompt that the frontend gets at once."""
    body = {"model": MODEL, "input": items, "max_output_tokens": 4, **more}
    found: int = talking.post("/v1/responses", body).json()["usage"]["input_tokens"]
    return found


def test_conversation_goes_on_from_a_response(client: openai.OpenAI, talking: Stack) -> None:
    first = ask(client, "what is the capital of France", instructions="Answer in one word.")
    assert client.responses.retrieve(first.id) == first
    second = ask(client, "and of Peru", previous_response_id=first.id)
    streamed = ask(client, "and of Spain", previous_response_id=second.id, stream=True)
    last = next(event.response for event in streamed if event.type == "response.incomplete")
    assert (second.previous_response_id, last.previous_response_id) == (first.id, second.id)
    assert client.responses.retrieve(last.id).output == last.output
    conversation: list[Any] = []
    for text, answer in (("what is the capital of France", first), ("and of Peru", second)):
        conversation += [{"role": "user", "content": text}, answer.output[0].to_dict()]
    assert second.usage.input_tokens == whole(talking, [*conversation[:2], user("and of Peru")])
    assert last.usage.input_tokens == whole(talking, [*conversation, user("and of Spain")])


def in_flight(talking: Stack) -> int:
    found: int = talking.workers[0].admin("status").json()["in_flight"]
    return found


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_calls_of_functions_and_their_outputs_stay_in_the_history(
    client: openai.OpenAI, talking: Stack
) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    output = {"type": "function_call_output", "call_id": "c1", "output": "3"}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}]
    first = ask(client, [user("add"), thought, call, output], tools=tools, tool_choice="none")
    second = ask(client, "once more", previous_response_id=first.id, tools=tools, tool_choice="none")
    items = [user("add"), thought, call, output, first.output[0].to_dict(), user("once more")]
    assert second.usage.input_tokens == whole(talking, items, tools=tools, tool_choice="none")
    kinds = [item.type for item in client.responses.input_items.list(second.id, order="asc", limit=2)]
    made = [item.get("type", "message") for item in items]
    assert kinds == made


def test_nothing_is_kept_of_a_response_that_is_not_stored(client: openai.OpenAI) -> None:
    plain = ask(client, "hello", store=False)
    streamed = ask(client, "hello", store=False, stream=True)
    ids = [plain.id, *(event.response.id for event in streamed if event.type == "response.created")]
    assert (plain.store, len(ids)) == (False, 2)
    for response_id in ids:
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response_id)


def test_other_tenants_find_nothing(gate: Gateway, client: openai.OpenAI) -> None:
    other, kept = gate.client("b"), ask(client, "hello")
    for ask_for in (
        lambda: other.responses.retrieve(kept.id),
        lambda: other.responses.delete(kept.id),
        lambda: other.responses.cancel(kept.id),
        lambda: other.responses.input_items.list(kept.id),
        lambda: ask(other, [{"type": "item_reference", "id": kept.output[0].id}]),
    ):
        with pytest.raises(openai.NotFoundError):
            ask_for()
    with pytest.raises(openai.BadRequestError) as refused:
        ask(other, "more", previous_response_id=kept.id)
    assert refused.value.code == "previous_response_not_found"
    client.responses.delete(kept.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(kept.id)


def test_tokens_of_a_history_are_counted(client: openai.OpenAI) -> None:
    kept = ask(client, "hello, this is a long beginning of a conversation")
    alone = client.responses.input_tokens.count(model=MODEL, input="more")
    after = client.responses.input_tokens.count(model=MODEL, input="more", previous_response_id=kept.id)
    assert after.input_tokens > alone.input_tokens


def ended(client: openai.OpenAI, response_id: str) -> Any:
    states: list[Any] = []

    def has_ended() -> bool:
        states.append(client.responses.retrieve(response_id))
        return states[-1].status not in ("queued", "in_progress")

    until("the response to end", has_ended)
    return states[-1]


def test_background_response_is_polled(client: openai.OpenAI, talking: Stack) -> None:
    first = ask(client, "hello")
    queued = ask(client, "more", previous_response_id=first.id, background=True)
    assert queued.status == "queued"
    found = ended(client, queued.id)
    assert (found.id, found.status, found.background) == (queued.id, "incomplete", True)
    assert (found.created_at, found.previous_response_id) == (queued.created_at, first.id)
    items = [user("hello"), first.output[0].to_dict(), user("more")]
    assert found.usage.input_tokens == whole(talking, items)
    assert ask(client, "last", previous_response_id=found.id).previous_response_id == found.id


def test_failed_background_response_says_why(client: openai.OpenAI) -> None:
    found = ended(client, client.responses.create(model="nobody", input="hello", background=True).id)
    assert (found.status, found.error.message) == ("failed", "Model not found")


def test_cancelled_background_response_leaves_the_engine(client: openai.OpenAI, talking: Stack) -> None:
    made = ask(client, "hello", background=True, max_output_tokens=3500)
    until("it runs", lambda: in_flight(talking) > 0)
    with pytest.raises(openai.BadRequestError):
        ask(client, "more", previous_response_id=made.id)
    assert client.responses.cancel(made.id).status == "cancelled"
    until("it left", lambda: in_flight(talking) == 0)
    assert client.responses.cancel(made.id).status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_background_response_is_started_again_after_a_kill(talking: Stack, tmp_path: Path) -> None:
    with gateway(talking.url, tmp_path, responses={"beat_seconds": 0.2}) as mine:
        client = mine.client()
        made = ask(client, "hello", background=True, max_output_tokens=1000)
        until("it runs", lambda: in_flight(talking) > 0)
        mine.kill()
        until("it left", lambda: in_flight(talking) == 0)
        mine.start()
        found = ended(client, made.id)
        assert (found.status, found.usage.output_tokens) == ("incomplete", 1000)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("psycopg")
    with postgres(tmp_path_factory.mktemp("postgres")) as started:
        yield started


@pytest.fixture
async def in_postgres(server: Server, tmp_path: Path) -> AsyncIterator[App]:
    async with app(tmp_path, database_url=server.url) as made:
        yield made


async def test_postgresql_keeps_finds_and_forgets_as_sqlite_does(in_postgres: App) -> None:
    item = {"type": "message", "role": "user", "content": "é" * 1000, "id": "msg_é"}
    first = (await in_postgres.create([item])).json()
    named = [{"type": "item_reference", "id": "msg_é"}] * 600
    second = (await in_postgres.create(named, previous_response_id=first["id"])).json()
    assert in_postgres.frontend.input() == [item, *first["output"], *[item] * 600]
    queued = await in_postgres.queue("more", previous_response_id=second["id"])
    assert (await in_postgres.until(queued, "completed"))["previous_response_id"] == second["id"]
    page = (await in_postgres.send("GET", f"{PATH}/{queued}/input_items?order=asc&limit=3")).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (
        ["msg_é", first["output"][0]["id"], "msg_é"],
        True,
    )
    cancelled = await in_postgres.queue("never")
    await in_postgres.send("POST", f"{PATH}/{cancelled}/cancel")
    for name in (queued, second["id"], first["id"], cancelled):
        assert (await in_postgres.send("DELETE", f"{PATH}/{name}")).status_code == 200
    assert (await in_postgres.create(named)).status_code == 404
    for table in ("responses", "response_items", "response_references", "response_item_names"):
        work = partial(rows_of, table=f"gateway_{table}")
        assert in_postgres.database.run_now(work) == 0


def rows_of(t: Transaction, table: str) -> int:
    (row,) = t.all(f"SELECT COUNT(*) FROM {table}")
    return int(row[0])


async def test_text_with_nul_is_no_fault_of_postgresql(in_postgres: App) -> None:
    text = "a\0b"
    message = {"type": "message", "role": "user", "content": text, "metadata": {text: text}}
    answer = await in_postgres.create([message], instructions=text, user=text)
    assert answer.status_code == 200
    queued = await in_postgres.queue([message], instructions=text)
    await in_postgres.until(queued, "completed")
    sent = json.loads(in_postgres.frontend.requests[-1].content)
    assert (sent["instructions"], sent["input"][0]["metadata"]) == (text, {text: text})
    for given in ([{**message, "id": text}], [{"type": "item_reference", "id": text}]):
        refused = await in_postgres.create(given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    refused = await in_postgres.create("x", previous_response_id=text)
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
        assert (await in_postgres.send(method, f"{PATH}/a%00b{path}")).status_code == 404
    items = await in_postgres.send("GET", f"{PATH}/{queued}/input_items?after=%00")
    assert items.status_code == 400
