"""Tokenisation for others, over the fake engine's tokens."""

from __future__ import annotations

import asyncio
from typing import Any

from dynamo_vllm.engine.fake.parts import FakeTokens
from dynamo_vllm.serving.tokens import endpoint
from dynamo_vllm.serving.tokens.endpoint import TokenService


class Slow(FakeTokens):
    """Waits until it is told."""

    def __init__(self) -> None:
        super().__init__(1000)
        self.go = asyncio.Event()
        self.running = 0

    async def of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.running += 1
        await self.go.wait()
        return await super().of_text(text, add_special_tokens=add_special_tokens)


def service(tokens: FakeTokens | None = None) -> TokenService:
    return TokenService(tokens or FakeTokens(1000), lambda: ["tiny", "sql"], 4096)


async def asked(made: TokenService, operation: str, **body: Any) -> dict[str, Any]:
    (reply,) = [reply async for reply in made.answer({"operation": operation, "body": body})]
    return reply


async def test_text_becomes_tokens_and_text_again() -> None:
    made = service()
    found = await asked(made, "tokenize", prompt="abc", model="sql", return_token_strs=True)
    tokens = {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [1, 97, 98, 99],
        "token_strs": ["\x01", "a", "b", "c"],
    }
    assert found == {"status": 200, "body": tokens}
    assert (await asked(made, "detokenize", tokens=[97, 98]))["body"] == {"prompt": "ab"}


async def test_chat_has_no_special_tokens_unless_asked() -> None:
    chat = [{"role": "user", "content": "ab"}]
    for more, count in (({}, 2), ({"add_special_tokens": True}, 3)):
        assert (await asked(service(), "tokenize", messages=chat, **more))["body"]["count"] == count


async def test_bad_requests_are_refused() -> None:
    picture = [{"role": "user", "content": [{"type": "input_image"}]}]
    bad: list[tuple[str, dict[str, Any], int]] = [
        ("tokenize", {}, 400),
        ("tokenize", {"prompt": 5}, 400),
        ("tokenize", {"prompt": "a", "model": "nobody"}, 404),
        ("tokenize", {"prompt": "a" * (endpoint.MOST_CHARACTERS + 1)}, 400),
        ("tokenize", {"messages": picture}, 400),
        ("tokenize", {"messages": [], "chat_template_kwargs": {"tokenize": True}}, 400),
        ("detokenize", {"tokens": [-1]}, 400),
        ("detokenize", {}, 400),
        ("nonsense", {}, 400),
    ]
    for operation, body, status in bad:
        assert (await asked(service(), operation, **body))["status"] == status, (operation, body)
    odd: list[Any] = [None, 5, [], {"operation": "tokenize", "body": 5}]
    for request in odd:
        (reply,) = [reply async for reply in service().answer(request)]
        assert reply["status"] == 400


async def test_one_conversion_at_a_time_and_few_wait() -> None:
    tokens = Slow()
    made = service(tokens)
    waiting = [
        asyncio.ensure_future(asked(made, "tokenize", prompt="a")) for _ in range(endpoint.MOST_WAITING)
    ]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await asked(made, "tokenize", prompt="a"))["status"] == 503
    assert tokens.running == 1
    tokens.go.set()
    assert {reply["status"] for reply in await asyncio.gather(*waiting)} == {200}
