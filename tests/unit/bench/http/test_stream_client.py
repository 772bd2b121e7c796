"""The client of the load: whatever way the bytes come, the same answer; whatever goes wrong, a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from dynamo_vllm.bench.http.answers import Answer
from dynamo_vllm.bench.http.connection import Connection
from dynamo_vllm.bench.http.stream_client import StreamClient
from dynamo_vllm.bench.http.target import parse_target
from dynamo_vllm.bench.report.figures import gaps, is_ok, ttft
from harness import sse
from harness.sse import DONE, HEAD, LAST_CHUNK, chunk, event, plain, stream, token, usage

ANSWER = stream(
    event(choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]),
    b": a comment\n\n",
    event(choices=[{"index": 0, "delta": {"content": "Gr"}}]),
    event(choices=[{"index": 0, "delta": {"content": "üß"}}]),
    event(choices=[{"index": 0, "delta": {"content": "e"}, "finish_reason": "length"}]),
    usage(7, 3, cached=4),
    DONE,
)


class Wire(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.aborted = False

    def write(self, data: Any) -> None:
        self.written += data

    def abort(self) -> None:
        self.aborted = True


async def fed(*pieces: bytes, lost: bool = False) -> Answer:
    """The answer to a request when exactly these pieces come back, one read each."""
    connection = Connection()
    connection.connection_made(Wire())
    asking = asyncio.ensure_future(connection.ask(b"request", keep_text=True))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if lost:
        connection.connection_lost(None)
    return await asyncio.wait_for(asking, 30)


async def asked(script: sse.Script, times: int = 1) -> tuple[list[Answer], sse.Server]:
    async with sse.scripted(script) as server:
        client = StreamClient(parse_target(server.url), "/v1/completions", 60)
        answers = [await client.ask(b'{"number": 1}') for _ in range(times)]
        client.close()
    return answers, server


# --- the same bytes, cut anywhere -------------------------------------------------------------------------


def facts(answer: Answer) -> tuple[Any, ...]:
    counted = (answer.events, answer.prompt_tokens, answer.output_tokens, answer.cached_tokens)
    return (*counted, answer.text, answer.error, len(gaps(answer)))


async def test_answer_is_the_same_wherever_a_read_ends() -> None:
    whole = facts(await fed(ANSWER))
    assert whole == (3, 7, 3, 4, "Grüße", "", 2)
    for cut in range(1, len(ANSWER)):
        assert facts(await fed(ANSWER[:cut], ANSWER[cut:])) == whole, cut


async def test_answer_is_the_same_byte_by_byte_over_a_socket() -> None:
    (answer,), _ = await asked(lambda _: [ANSWER[i : i + 1] for i in range(len(ANSWER))])
    assert facts(answer)[:4] == (3, 7, 3, 4)


async def test_several_events_in_a_chunk_and_one_event_in_several_chunks() -> None:
    body = token("a") + token("b") + token("c", "stop") + usage(1, 3) + DONE
    for size in (1, 7, 50, len(body)):
        chunks = b"".join(chunk(body[at : at + size]) for at in range(0, len(body), size))
        assert facts(await fed(HEAD + chunks + LAST_CHUNK))[:5] == (3, 1, 3, 0, "abc")


async def test_line_ends_of_two_bytes() -> None:
    body = (token("a") + token("b", "stop") + DONE).replace(b"\n", b"\r\n")
    whole = HEAD + chunk(body[:40]) + chunk(body[40:]) + LAST_CHUNK
    for cut in range(1, len(whole)):
        assert (await fed(whole[:cut], whole[cut:])).text == "ab", cut
    for at in range(1, len(body)):  # a chunk may end between the two bytes
        assert (await fed(HEAD + chunk(body[:at]) + chunk(body[at:]) + LAST_CHUNK)).text == "ab", at


async def test_chunk_extension_trailer_and_interim_answer() -> None:
    body = token("a", "stop") + DONE
    odd = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"%x;name=1\r\n" % len(body) + body
    odd += b"\r\n0\r\nX: y\r\n\r\n"
    for cut in range(1, len(odd)):
        assert facts(await fed(odd[:cut], odd[cut:]))[4:6] == ("a", ""), cut


async def test_stream_without_chunks_has_a_length_or_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    answer = await fed(head + b"\r\n", token("a"), token("b", "stop"), DONE, lost=True)
    assert facts(answer)[4:6] == ("ab", "")
    body = token("a", "stop") + DONE
    whole = head + b"content-length: %d\r\n\r\n" % len(body) + body
    assert facts(await fed(whole[:-9], whole[-9:]))[4:6] == ("a", "")


# --- what counts as a token -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "counted"),
    [
        ([token("a"), token("b"), token("", "stop")], (2, 1, 2, "ab")),  # an end of its own is no token
        ([token("a"), token(""), token("b", "stop")], (3, 2, 3, "ab")),  # one without text is
        ([b'data: {"choices" : [ {"text": "a", "finish_reason": "stop"} ]}\n\n'], (1, 0, 1, "a")),
    ],
)
async def test_server_without_usage_has_its_events_counted(
    events: list[bytes], counted: tuple[int, int, int, str]
) -> None:
    answer = await fed(stream(*events, DONE))
    assert (answer.events, len(gaps(answer)), answer.output_tokens, answer.text) == counted
    assert answer.cached_tokens is None


# --- what can go wrong ------------------------------------------------------------------------------------


FAILURES: list[tuple[list[bytes | None], str]] = [
    ([plain(404, b'{"message": "Model not found", "code": 404}')], "HTTP 404: Model not found"),
    ([plain(400, b'{"error": {"message": "too\\nlong"}}')], "HTTP 400: too long"),
    ([plain(422, b'{"detail": "no"}')], "HTTP 422: no"),
    ([plain(503, b"")], "HTTP 503: no reason given"),
    ([plain(200, b"{}")], "the answer is not a stream; its type is application/json"),
    ([stream(token(), event(error={"message": "engine died"}), DONE)], "engine died"),
    ([stream(token(), b"event: error\n: lost\n\n", DONE)], "lost"),
    ([stream(token(), b'event: error\ndata: {"message": "lost"}\n\n', DONE)], "lost"),
    ([stream(token(), b"data: {nonsense\n\n", DONE)], "an event of the stream cannot be read"),
    ([stream(b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE)], "an event of the stream cannot"),
    ([plain(500, b'{"message": "\xff"}')], 'HTTP 500: {"message": "\ufffd"}'),
    ([stream(token(), token())], "the stream ended early, after 2 events"),
    ([HEAD, chunk(token()), None], "the connection was closed after 1 events"),
    ([None], "the connection was closed before an answer"),
    ([HEAD, b"zz\r\n"], "the chunks of the answer are malformed"),
    ([HEAD, b"-5\r\n\r\n\r\n"], "the chunks of the answer are malformed"),
    ([b"SSH-2.0-OpenSSH\r\n\r\n"], "the server does not speak HTTP"),
    ([b"x" * 70000], "the server does not speak HTTP"),
]


async def test_failure_is_an_answer_with_a_reason_and_does_not_spoil_the_next() -> None:
    for pieces, error in FAILURES:
        replies = [[ANSWER], pieces]
        (failed, following), _ = await asked(lambda _, left=replies: left.pop(), times=2)  # type: ignore[misc]
        assert failed.error.startswith(error)
        assert not is_ok(failed) and is_ok(following)


async def test_connection_that_nobody_takes() -> None:
    client = StreamClient(parse_target("http://127.0.0.1:1"), "/v1/completions", 60)
    assert (await client.ask(b"{}")).error == "cannot connect: Connection refused"


async def test_silent_server_is_given_up() -> None:
    held = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(token()))
        await held.wait()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    answer = await StreamClient(parse_target(f"127.0.0.1:{port}"), "/", 0.1).ask(b"{}")
    held.set()
    server.close()
    assert (answer.error, answer.events) == ("the server sent nothing for 0.1 s", 1)


# --- connections ------------------------------------------------------------------------------------------


async def test_connection_is_kept() -> None:
    answers, server = await asked(lambda _: [ANSWER], times=3)
    assert all(map(is_ok, answers)) and (server.connections, len(server.requests)) == (1, 3)
    pieces = [ANSWER[:-4], *(ANSWER[i : i + 1] for i in range(-4, -1)), b"\n"]
    answers, server = await asked(lambda _: pieces, 2)
    assert all(map(is_ok, answers)) and server.connections == 1, "the end came in pieces"


async def test_making_a_connection_counts_as_waiting() -> None:
    class FarAway(StreamClient):
        async def _connect(self) -> Connection:
            await asyncio.sleep(0.05)
            return await super()._connect()

    async with sse.scripted(lambda _: [ANSWER]) as server:
        client = FarAway(parse_target(server.url), "/v1/completions", 60)
        first, *others = [await client.ask(b"{}") for _ in range(6)]
        client.close()
    assert ttft(first) >= 0.05 > min(map(ttft, others))


async def test_connection_the_server_closed_meanwhile_is_replaced() -> None:
    answers, server = await asked(lambda _: [ANSWER, None], times=3)
    assert all(map(is_ok, answers)) and (server.connections, len(server.requests)) == (3, 3)


@pytest.mark.parametrize("surplus", [b"x", b"HTTP/1.1 ", ANSWER, plain(500, b"{}")])
async def test_connection_is_not_used_again_when_more_comes_than_was_asked_for(surplus: bytes) -> None:
    answers, server = await asked(lambda _: [ANSWER + surplus], times=2)
    assert all(map(is_ok, answers)) and server.connections == 2


async def test_connection_is_not_used_again_when_the_server_says_so() -> None:
    said = plain(500, b"{}", b"connection: close")
    _, server = await asked(lambda _: [said], times=2)
    assert server.connections == 2


async def test_abort_leaves_what_is_in_flight() -> None:
    held = asyncio.Event()

    def script(request: sse.Request) -> Iterable[bytes | None]:
        held.set()
        return [HEAD, chunk(token())]

    async with sse.scripted(script) as server:
        client = StreamClient(parse_target(server.url), "/v1/completions", 60)
        asking = asyncio.create_task(client.ask(b"{}"))
        await held.wait()
        client.abort()
        answer = await asking
        client.close()
    assert answer.aborted and not answer.error and not is_ok(answer)


async def test_request_carries_key_host_and_length() -> None:
    async with sse.scripted(lambda _: [ANSWER]) as server:
        client = StreamClient(parse_target(f"{server.url}/proxy/v1/", "secret"), "/v1/completions", 60)
        await client.ask(b'{"a": 1}')
        client.close()
    (request,) = server.requests
    assert request.path == "/proxy/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["host"] == f"127.0.0.1:{server.port}"
    assert request.body == {"a": 1}
