"""Parses reasoning and tool calls with vLLM's parsers in text mode, where the frontend parses nothing."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager
from vllm.reasoning import ReasoningParserManager
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager

from dynamo_vllm.engine.vllm.compat import abilities
from dynamo_vllm.errors import ConfigError, InvalidRequest
from dynamo_vllm.job import GUIDE_KINDS, AnswerPart, Guide, Output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.parser.abstract_parser import Parser

    from dynamo_vllm.engine.settings import EngineSettings
    from dynamo_vllm.engine.vllm.names import ModelConfig
    from dynamo_vllm.wire_openai import ChatBody


def parser_class(settings: EngineSettings, model: ModelConfig) -> type[Parser] | None:
    """Returns one class for both parsers; None if none is configured, or if the frontend parses."""
    if not settings.parses_answers:
        return None
    _refuse_unknown("--tool-call-parser", settings.tool_call_parser, ToolParserManager)
    _refuse_unknown("--reasoning-parser", settings.reasoning_parser, ReasoningParserManager)
    try:
        found: type[Parser] | None = ParserManager.get_parser(
            settings.tool_call_parser,
            settings.reasoning_parser,
            enable_auto_tools=True,
            is_harmony=model.hf_config.model_type == "gpt_oss",
        )
    except TypeError as exc:  # since vLLM 0.32 for two that do not go together
        raise ConfigError(f"--tool-call-parser and --reasoning-parser: {exc}") from exc
    if found is not None:
        _refuse_for_tokenizer(found, model)
    return found


def _refuse_for_tokenizer(parser: type[Parser], model: ModelConfig) -> None:
    """A tokenizer without the marks that a parser looks for would refuse every chat."""
    tokenizer = cached_tokenizer_from_config(model)
    try:
        parser(tokenizer, model_config=model)
    except (RuntimeError, ValueError, TypeError, LookupError, ImportError) as exc:
        raise ConfigError(
            f"--tool-call-parser, --reasoning-parser: not for the tokenizer of {model.model}: {exc}"
        ) from exc


def _refuse_unknown(flag: str, name: str | None, manager: Any) -> None:
    known = manager.list_registered()
    if name is not None and name not in known:
        raise ConfigError(
            f"{flag} {name}: with --use-vllm-tokenizer vLLM parses, and it knows only {', '.join(known)}"
        )


class Parsing:
    """Parses the answer to one request, and adjusts the request as the parsers need it."""

    def __init__(
        self,
        parser: Any,
        tokenizer: Any,
        model: ModelConfig,
        body: ChatBody,
        template_kwargs: Mapping[str, Any],
    ) -> None:
        request = _request(body)
        self._make = functools.partial(
            parser, tokenizer, request.tools, chat_template_kwargs=dict(template_kwargs), model_config=model
        )
        if _sees_request(parser, request.tool_choice):
            request = self._make().adjust_request(request)
        self._request = request

    @property
    def guide(self) -> Guide | None:
        """Returns the constraint that forces the tool calls which the client requires."""
        found = self._request.structured_outputs
        return None if found is None else Guide(**{kind: getattr(found, kind) for kind in GUIDE_KINDS})

    @property
    def reads_special_tokens(self) -> bool:
        """Returns whether the text must include special tokens: some models mark tool calls with them."""
        return not self._request.skip_special_tokens

    def choice(self, prompt: Sequence[int]) -> Choice:
        return Choice(self._make(), self._request, list(prompt))


class Choice:
    """Parses one choice of an answer while it streams."""

    def __init__(self, parser: Parser, request: ChatCompletionRequest, prompt: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._prompt = prompt

    def part(self, output: Output) -> AnswerPart:
        found = self._parser.parse_delta(
            output.text or "",
            list(output.token_ids),
            self._request,
            self._prompt,
            finished=output.finish is not None,
        )
        if found is None:
            return AnswerPart()
        calls = [call.model_dump(exclude_none=True) for call in found.tool_calls or ()]
        return AnswerPart(found.content or "", found.reasoning or "", calls)


def _sees_request(parser: Any, tool_choice: object) -> bool:
    """Returns whether the parser may adjust the request, as in vLLM's own server.

    With tool_choice "none" markup in special tokens stays hidden.
    """
    if parser.reasoning_parser_cls is not None or tool_choice != "none":
        return True
    return bool(abilities.parsers_say_whether_to_see_every_request() and parser.always_adjust_request)


def _request(body: ChatBody) -> ChatCompletionRequest:
    """Returns the request in vLLM's type; the parsers count the tool calls in its messages."""
    given: dict[str, object] = {"messages": []}
    if body.tools:
        given["tools"] = body.tools
        if body.tool_choice is not None:
            given["tool_choice"] = body.tool_choice
    try:
        request = ChatCompletionRequest.model_validate(given)
    except ValidationError as exc:
        first = exc.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "tools"
        raise InvalidRequest(first["msg"], parameter=where) from exc
    request.messages = list(body.messages)
    return request
