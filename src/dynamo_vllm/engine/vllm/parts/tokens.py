"""Converts between text and token ids as `vllm serve` does at /tokenize and /detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.renderers import ChatParams, TokenizeParams

from dynamo_vllm.engine.vllm.parts.renderer import refusing
from dynamo_vllm.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.engine.vllm.names import Renderer


class VllmTokens:
    """Uses vLLM's renderer, whose own threads do the work."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    async def of_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with refusing("prompt"):
            return await self._ids({"prompt": text}, add_special_tokens)

    async def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        kwargs = {**options.get("kwargs", {}), "tools": _checked(tools)}
        params = ChatParams(chat_template=options.get("template"), chat_template_kwargs=kwargs)
        with refusing("messages"):
            _, prompt = await self._renderer.render_messages_async(list(messages), params)
            return await self._ids(prompt, add_special_tokens)

    async def text(self, ids: Sequence[int]) -> str:
        params = TokenizeParams(max_total_tokens=None, needs_detokenization=True)
        with refusing("tokens"):
            found = await self._renderer.tokenize_prompt_async({"prompt_token_ids": list(ids)}, params)
        return str(found["prompt"])

    def strings(self, ids: Sequence[int]) -> list[str]:
        found: list[str] = self._renderer.get_tokenizer().convert_ids_to_tokens(list(ids))
        return found

    async def _ids(self, prompt: object, add_special_tokens: bool) -> list[int]:
        params = TokenizeParams(max_total_tokens=None, add_special_tokens=add_special_tokens)
        tokens = await self._renderer.tokenize_prompt_async(prompt, params)
        return list(tokens["prompt_token_ids"])


def _checked(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Returns the tools with all fields that vLLM gives to a template."""
    if tools is None:
        return None
    try:
        return [ChatCompletionToolsParam.model_validate(tool).model_dump() for tool in tools]
    except ValidationError as exc:
        first = exc.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidRequest(f"{where}: {first['msg']}", parameter="tools") from None
