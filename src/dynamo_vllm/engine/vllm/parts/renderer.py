"""Tokenises chats and texts with vLLM's renderer, and creates parsers for answers (text mode)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from vllm.renderers import ChatParams

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.engine.vllm.parts import parsing
from dynamo_vllm.errors import DynamoVllmError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from vllm.parser.abstract_parser import Parser

    from dynamo_vllm.engine.vllm.names import Renderer
    from dynamo_vllm.job import AnswerParser
    from dynamo_vllm.wire_openai import ChatBody


class VllmRenderer:
    """Renders prompts for one engine; without a parser, answers are only text."""

    def __init__(self, renderer: Renderer, parser: type[Parser] | None) -> None:
        self._renderer = renderer
        self._parser = parser

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        params = ChatParams(
            chat_template=options.get("template"), chat_template_kwargs=options.get("kwargs", {})
        )
        renderer = self._renderer
        with refusing("messages"):
            # vLLM 0.30 checks the length only while it tokenises, in the only thread that it has for this.
            renderer.default_chat_tok_params.apply_pre_tokenization(
                renderer.get_tokenizer(), {"prompt": "".join(_words(messages))}
            )
            # Not `render_chat_async`: `VllmMedia.process` puts media into the prompt.
            _, text = await renderer.render_messages_async(list(messages), params)
            tokens = await renderer.tokenize_prompt_async(text, renderer.default_chat_tok_params)
        return list(tokens["prompt_token_ids"])

    async def render_text(self, prompt: str) -> list[int]:
        with refusing("prompt"):
            (rendered,) = await self._renderer.render_cmpl_async([{"prompt": prompt}])
        return list(rendered["prompt_token_ids"])

    def answer_parser(self, body: ChatBody, template_kwargs: Mapping[str, object]) -> AnswerParser | None:
        if self._parser is None:
            return None
        tokenizer, model = self._renderer.get_tokenizer(), self._renderer.model_config
        with refusing("tools"):
            return parsing.Parsing(self._parser, tokenizer, model, body, template_kwargs)


def _words(messages: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the texts in the messages of a chat."""
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        yield from (text for part in parts if isinstance(text := part.get("text"), str))


@contextlib.contextmanager
def refusing(parameter: str) -> Iterator[None]:
    """Converts refusals of vLLM's renderer to InvalidRequest with the name of the request's field."""
    try:
        yield
    except DynamoVllmError:
        raise
    except Exception as exc:
        found = convert.error(exc)
        if isinstance(found, InvalidRequest):
            raise InvalidRequest(str(found), parameter=parameter) from exc
        raise found from exc
