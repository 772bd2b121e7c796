"""Tokens of a worker equal those of `vllm serve` at /tokenize, with the demo model's tokenizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import TypeAdapter
from starlette.requests import Request
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.renderers.registry import renderer_from_config

from dynamo_vllm.engine.vllm.parts.tokens import VllmTokens
from dynamo_vllm.models import demo
from dynamo_vllm.serving.tokens.endpoint import TokenService

serving = pytest.importorskip("vllm.entrypoints.serve.tokenize.serving", reason="vLLM before 0.31")
protocol = pytest.importorskip("vllm.entrypoints.serve.tokenize.protocol")
READER: TypeAdapter[Any] = TypeAdapter(protocol.TokenizeRequest)  # pydantic reads lazily: it must live on

MODEL = str(demo.folder("chat"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "says it",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": " there"}]},
    {"role": "assistant", "content": "Grüezi 你好", "reasoning_content": "hm"},
    {"role": "user", "content": "how is the weather"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
BODIES: list[dict[str, Any]] = [
    {"prompt": "hello <|im_end|> world"},
    {"prompt": ""},
    {"prompt": "hello", "add_special_tokens": False},
    {"prompt": "Grüezi 你好 👋", "return_token_strs": True},
    {"messages": CHAT[:2]},
    {"messages": CHAT, "return_token_strs": True},
    {"messages": CHAT, "add_generation_prompt": False},
    {"messages": CHAT[:3], "add_generation_prompt": False, "continue_final_message": True},
    {"messages": CHAT, "tools": TOOLS, "add_special_tokens": True},
    {"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
]
REFUSED: list[dict[str, Any]] = [
    {"messages": CHAT, "chat_template": "x"},
    {"messages": CHAT, "chat_template_kwargs": {"chat_template": "x"}},
    {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True},
    {"messages": CHAT, "tools": [{"type": "function"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
    {"messages": 5},
    {"prompt": 5},
    {},
]


@pytest.fixture(scope="module")
def renderer() -> Any:
    return renderer_from_config(AsyncEngineArgs(model=MODEL, enforce_eager=True).create_engine_config())


@pytest.fixture(scope="module")
def theirs(renderer: Any) -> Any:
    from vllm.entrypoints.openai.models.protocol import BaseModelPath
    from vllm.entrypoints.openai.models.serving import OpenAIModelRegistry
    from vllm.renderers.online_renderer import OnlineRenderer

    config = renderer.model_config
    online = OnlineRenderer(
        config, renderer, request_logger=None, chat_template=None, chat_template_content_format="auto"
    )
    models = OpenAIModelRegistry(config, [BaseModelPath(name="demo", model_path=MODEL)])
    return serving.ServingTokenization(
        models, online, chat_template=None, chat_template_content_format="auto"
    )


@pytest.fixture
def ours(renderer: Any) -> TokenService:
    return TokenService(VllmTokens(renderer), lambda: ["demo"], renderer.model_config.max_model_len)


async def asked(service: TokenService, operation: str, **body: Any) -> dict[str, Any]:
    (reply,) = [reply async for reply in service.answer({"operation": operation, "body": body})]
    return reply


def empty_request() -> Request:
    return Request({"type": "http", "headers": []})


@pytest.mark.parametrize("body", BODIES)
async def test_tokens_are_those_of_vllm(ours: TokenService, theirs: Any, body: dict[str, Any]) -> None:
    request = READER.validate_python(copy.deepcopy(body))  # vLLM changes messages where they are
    wanted = (await theirs.create_tokenize(request, empty_request())).model_dump()
    found = await asked(ours, "tokenize", **copy.deepcopy(body))
    assert found == {"status": 200, "body": wanted}
    back = protocol.DetokenizeRequest(tokens=wanted["tokens"])
    text = (await theirs.create_detokenize(back, empty_request())).model_dump()
    assert await asked(ours, "detokenize", tokens=wanted["tokens"]) == {"status": 200, "body": text}


async def test_bad_requests_are_refused_and_bad_tokens_do_no_harm(ours: TokenService) -> None:
    for body in REFUSED:
        assert (await asked(ours, "tokenize", **body))["status"] == 400, body
    for tokens in ([-1], [1 << 40], ["a"], None, [999_999_999]):
        assert (await asked(ours, "detokenize", tokens=tokens))["status"] in (200, 400)
