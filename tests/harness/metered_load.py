"""Mixed requests through a gateway, of which each that got its usage knows it: for tests of the ledger."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

KINDS = ("unary", "stream", "choices", "prompts", "chat", "messages", "left", "refused")
REQUEST = "x-request-id"


@dataclass
class Told:
    """What clients were told, by the id of each request."""

    usage: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Prompt and completion tokens."""
    least: dict[str, int] = field(default_factory=dict)
    """Requests whose client left: tokens that it had got."""
    outcomes: Counter[str] = field(default_factory=Counter)
    done: int = 0


async def send(
    url: str,
    secrets: Sequence[str],
    count: int,
    *,
    at_once: int = 16,
    at: dict[int, Callable[[], None]] | None = None,
    seed: int = 1,
) -> Told:
    """Send requests of all kinds; `at` so many answers call a function, for example one that kills."""
    told, chance, events = Told(), random.Random(seed), dict(at or {})
    plans = [(chance.choice(KINDS), chance.choice(secrets), chance.randrange(1, 40)) for _ in range(count)]
    limits = httpx.Limits(max_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:
        left = iter(plans)

        async def one_after_the_other() -> None:
            for kind, secret, tokens in left:
                try:
                    outcome = await patiently(client, kind, secret, tokens, told)
                except (httpx.TransportError, json.JSONDecodeError):
                    outcome = "cut off"
                told.outcomes[outcome] += 1
                told.done += 1
                if (event := events.pop(told.done, None)) is not None:
                    event()

        await asyncio.gather(*(one_after_the_other() for _ in range(at_once)))
    return told


async def patiently(client: httpx.AsyncClient, kind: str, secret: str, tokens: int, told: Told) -> str:
    """Try again while nobody listens."""
    deadline = asyncio.get_running_loop().time() + 60
    while True:
        try:
            return await ask(client, kind, secret, tokens, told)
        except httpx.ConnectError:
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.05)


async def ask(client: httpx.AsyncClient, kind: str, secret: str, tokens: int, told: Told) -> str:
    path, body = request(kind, tokens)
    headers = {"authorization": f"Bearer {secret}"}
    if kind not in ("stream", "left"):
        reply = await client.post(path, json=body, headers=headers)
        if reply.status_code == 200:
            note(told, reply.headers[REQUEST], reply.json()["usage"])
        return f"{kind} {reply.status_code}"
    async with client.stream("POST", path, json=body, headers=headers) as stream:
        if stream.status_code != 200:
            return f"{kind} {stream.status_code}"
        got = 0
        async for line in stream.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk or "choices" not in chunk:
                return f"{kind} error"
            got += sum(bool(choice.get("text")) for choice in chunk["choices"])
            if kind == "left" and got >= tokens // 2:
                told.least[stream.headers[REQUEST]] = got
                return "left"
            if chunk.get("usage"):
                note(told, stream.headers[REQUEST], chunk["usage"])
                return f"{kind} 200"
    return f"{kind} without usage"


def request(kind: str, tokens: int) -> tuple[str, dict[str, Any]]:
    prompt = [10 + tokens] * (tokens + 3)
    base: dict[str, Any] = {"model": "demo-chat", "max_tokens": tokens}
    chat = {**base, "messages": [{"role": "user", "content": "word " * tokens}]}
    match kind:
        case "chat":
            return "/v1/chat/completions", chat
        case "messages":
            return "/v1/messages", chat
        case "choices":
            return "/v1/completions", {**base, "prompt": prompt, "n": 3}
        case "prompts":
            return "/v1/completions", {**base, "prompt": [prompt, prompt[:-1]]}
        case "stream" | "left":
            more = {"stream": True, "stream_options": {"include_usage": True}}
            return "/v1/completions", {**base, "prompt": prompt, **more}
        case "refused":
            return "/v1/completions", {**base, "prompt": prompt, "model": "nobody-has-this"}
    return "/v1/completions", {**base, "prompt": prompt}


def note(told: Told, request_id: str, usage: dict[str, Any]) -> None:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    completion = usage.get("completion_tokens", usage.get("output_tokens", 0))
    told.usage[request_id] = prompt, completion
