"""Clients of a gateway that leave at random moments of everything that it keeps or waits for."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import httpx

from dynamo_vllm.gateway.database import Database, Transaction
from dynamo_vllm.gateway.store.limits import RECORD_SECONDS, Limiter
from harness.several_kinds import sound
from harness.waiting import until

LAST_WORDS = "last words"
RESPONSES, FILES, BATCHES = "/v1/responses", "/v1/files", "/v1/batches"
SPEECH = "/v1/audio/transcriptions"
TOKENS = 12
PIECES = 8
"""In how many pieces a form is sent."""
LONGEST = 4.0
"""Of the time that a request takes alone: some clients stay to the end, beside 15 others."""
ENDED = ("completed", "failed", "expired", "cancelled")
Act = Callable[[httpx.AsyncClient, "Models"], Awaitable[httpx.Response | None]]


@dataclass(frozen=True)
class Models:
    """What the requests name; without one for speech nothing is transcribed."""

    chat: str = "demo-chat"
    speech: str | None = None


@dataclass
class Outcome:
    """What became of the clients, by kind of request and by how it ended."""

    ends: Counter[str] = field(default_factory=Counter)

    @property
    def left(self) -> int:
        return sum(count for name, count in self.ends.items() if name.endswith(" left"))

    def failures(self) -> dict[str, int]:
        """Return the answers that no client should get, whoever leaves."""
        good = (" left", " 200", " 429", " 503")
        return {name: count for name, count in self.ends.items() if not name.endswith(good)}


def response(**more: object) -> Act:
    async def act(client: httpx.AsyncClient, models: Models) -> httpx.Response:
        body = {"model": models.chat, "input": "say a word", "max_output_tokens": TOKENS, **more}
        return await client.post(RESPONSES, json=body)

    return act


class LastWords:
    """Leaves a streamed response about when its last token and its end come, and it is kept."""

    DELTA = "event: response.output_text.delta"
    LONGEST_SECONDS = 0.012

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._tokens = 0

    async def __call__(self, client: httpx.AsyncClient, models: Models) -> httpx.Response:
        body = {"model": models.chat, "input": "say a word", "max_output_tokens": TOKENS, "stream": True}
        tokens = 0
        async with client.stream("POST", RESPONSES, json=body) as reply:
            async for line in reply.aiter_lines():
                tokens += line == self.DELTA
                if line == self.DELTA and tokens == self._tokens - 1:
                    await asyncio.sleep(self._chance.uniform(0.0, self.LONGEST_SECONDS))
                    raise asyncio.CancelledError
        self._tokens = self._tokens or tokens
        return reply


async def cancelled(client: httpx.AsyncClient, models: Models) -> httpx.Response:
    reply = await response(background=True)(client, models)
    assert reply is not None
    if reply.status_code == 200:
        reply = await client.post(f"{RESPONSES}/{reply.json()['id']}/cancel")
    return reply


async def chat(client: httpx.AsyncClient, models: Models) -> httpx.Response:
    messages = [{"role": "user", "content": "say a word"}]
    body = {"model": models.chat, "messages": messages, "max_tokens": TOKENS, "stream": True}
    return await client.post("/v1/chat/completions", json=body)


async def batch(client: httpx.AsyncClient, models: Models) -> httpx.Response:
    body = {"model": models.chat, "prompt": "one", "max_tokens": TOKENS}
    lines = [
        json.dumps({"custom_id": f"c{n}", "method": "POST", "url": "/v1/completions", "body": body})
        for n in range(3)
    ]
    reply = await form(client, FILES, {"purpose": "batch"}, "\n".join(lines).encode())
    if reply.status_code != 200:
        return reply
    new = {"input_file_id": reply.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return await client.post(BATCHES, json=new)


async def upload(client: httpx.AsyncClient, models: Models) -> httpx.Response:
    return await form(client, FILES, {"purpose": "batch"}, b"x" * 300_000)


async def transcription(client: httpx.AsyncClient, models: Models) -> httpx.Response | None:
    if models.speech is None:
        return None
    return await form(client, SPEECH, {"model": models.speech}, sound(1))


async def form(
    client: httpx.AsyncClient, path: str, fields: Mapping[str, str], data: bytes
) -> httpx.Response:
    """Send a form piece by piece, so that the client may leave in the middle."""
    head = "".join(
        f'--edge\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    head += '--edge\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
    whole = head.encode() + data + b"\r\n--edge--\r\n"

    async def pieces() -> AsyncIterator[bytes]:
        size = -(-len(whole) // PIECES)
        for start in range(0, len(whole), size):
            yield whole[start : start + size]
            await asyncio.sleep(0)

    headers = {"content-type": "multipart/form-data; boundary=edge", "content-length": str(len(whole))}
    return await client.post(path, content=pieces(), headers=headers)


KINDS: Mapping[str, Act] = {
    "kept": response(),
    "streamed": response(stream=True),
    "background": response(background=True),
    "cancelled": cancelled,
    "chat": chat,
    "batch": batch,
    "upload": upload,
    "transcription": transcription,
}


async def leave(
    url: str, secret: str, count: int, *, models: Models, at_once: int = 16, seed: int = 1
) -> Outcome:
    """Send requests of all kinds, and leave each after a random part of the time that it takes."""
    chance, outcome = random.Random(seed), Outcome()
    last_words = LastWords(chance)
    kinds: dict[str, Act] = {**KINDS, LAST_WORDS: last_words}
    headers = {"authorization": f"Bearer {secret}"}

    def new_client() -> httpx.AsyncClient:  # certificates take longer to read than an answer takes
        return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, verify=False)

    seconds: dict[str, float] = {}
    for name, act in kinds.items():
        async with new_client() as client:
            began = time.monotonic()
            reply = await act(client, models)
            assert reply is None or reply.status_code == 200, f"{name}: {reply.text}"
            seconds[name] = time.monotonic() - began
    names = [name for name in KINDS if name != "transcription" or models.speech is not None]
    names += [LAST_WORDS] * (len(names) // 2)
    plans = iter([(names[n % len(names)], chance.uniform(0.0, LONGEST)) for n in range(count)])

    async def one_after_the_other() -> None:
        for name, part in plans:
            # A connection of its own: the next request must not wait for what is left of this one.
            async with new_client() as client:
                task = asyncio.ensure_future(_awaitable(kinds[name](client, models)))
                stays = name == LAST_WORDS
                await asyncio.wait({task}, timeout=120 if stays else part * seconds[name])
                task.cancel()
                (end,) = await asyncio.gather(task, return_exceptions=True)
            outcome.ends[f"{name} {described(end)}"] += 1

    await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return outcome


async def _awaitable(reply: Awaitable[httpx.Response | None]) -> httpx.Response | None:
    return await reply


def described(end: httpx.Response | BaseException | None) -> str:
    if isinstance(end, asyncio.CancelledError):
        return "left"
    return str(end.status_code) if isinstance(end, httpx.Response) else repr(end)


def wait_until_quiet(database: Database, seconds: float = 120) -> None:
    """Wait until all that clients left to do is done."""
    until("background responses to end", lambda: not database.run_now(open_responses), seconds, every=0.2)
    until("batches to end", lambda: not database.run_now(open_batches), seconds, every=0.2)
    until("seats to come back", lambda: not taken_seats(database), seconds, every=0.2)


def open_responses(t: Transaction) -> list[tuple[object, ...]]:
    return t.all("SELECT id FROM gateway_responses WHERE status IN ('queued', 'in_progress')")


def open_batches(t: Transaction) -> list[tuple[object, ...]]:
    return t.all(f"SELECT id FROM gateway_batches WHERE status NOT IN {ENDED}")


def taken_seats(database: Database) -> dict[str, int]:
    """Return the seats that are taken, by key and tenant."""
    rows = database.run_now(
        lambda t: t.all("SELECT subject, running FROM gateway_counters WHERE running > 0")
    )
    return {str(subject): int(running) for subject, running in rows}


async def booked_and_used(database: Database, key_id: str) -> tuple[int, int]:
    """Return the tokens in the key's day and those in the ledger, once no record is waited for any more."""
    later = time.time() + RECORD_SECONDS + 1
    await Limiter(database, "test").expire(0.0, now=later)

    def work(t: Transaction) -> tuple[int, int]:
        (day,) = t.one("SELECT day_tokens FROM gateway_counters WHERE subject = ?", f"key {key_id}") or (0,)
        (used,) = t.one("SELECT SUM(total_tokens) FROM gateway_usage_parts WHERE key = ?", key_id) or (0,)
        return int(day), int(used or 0)

    return await database.run(work)
