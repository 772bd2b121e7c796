"""Serves tokenisation over the runtime: one endpoint for all workers of a namespace.

It is not an admin verb, so that a process at the edge of a deployment needs no admin token for it. Only one
conversion at a time runs in a worker, whose first work is another. Here a worker also says what it is for,
so that others can call it without the frontend.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.errors import InvalidRequest, RequestError, UnknownModel
from dynamo_vllm.roles.text import TOKENIZER_ARGUMENTS
from dynamo_vllm.serving.tokens.address import endpoint_of
from dynamo_vllm.wire import describe

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from dynamo_vllm.engine.base import Tokens
    from dynamo_vllm.serving.calls.card import WorkerCard
    from dynamo_vllm.serving.plane.runtime import Runtime

logger = logging.getLogger(__name__)
MOST_CHARACTERS = 2 << 20
MOST_TOKENS = 1 << 20
MOST_WAITING = 32
_NOT_FOR_CLIENTS = TOKENIZER_ARGUMENTS | {"chat_template", "tokenize", "tools"}
_MEDIA = ("image", "audio", "video", "prompt_embeds")

Reply = dict[str, Any]


class Tokenize(msgspec.Struct, frozen=True):
    """The body of /tokenize, as `vllm serve` takes it; a field that vLLM ignores is ignored."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class Detokenize(msgspec.Struct, frozen=True):
    """The body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class Busy(RequestError):
    """More wait for a conversion than may."""

    status = 503


class TokenService:
    """Converts for whoever asks."""

    def __init__(
        self,
        tokens: Tokens | None,
        names: Callable[[], Sequence[str]],
        context_length: int,
        template: str | None = None,
        worker: WorkerCard | None = None,
    ) -> None:
        """`names` are the worker's models and adapters. Without `tokens` it only says what the worker is."""
        self._has_tokens = tokens
        self._worker = worker
        self._names = names
        self._context_length = context_length
        self._template = template
        self._turn = asyncio.Lock()
        self._waiting = 0

    def serve(self, drt: Runtime, address: str) -> None:
        drt.serve(endpoint_of(address), self.answer, "tokens are not converted for others")

    async def answer(self, request: object, context: object = None) -> AsyncIterator[Reply]:
        """Take {"operation", "body"} and yield one reply with a status as in HTTP."""
        try:
            yield {"status": 200, "body": await self._answered(request)}
        except RequestError as exc:
            yield {"status": exc.status, "message": str(exc), "parameter": exc.parameter}
        except Exception:
            logger.exception("a conversion of tokens failed")
            yield {"status": 500, "message": "it failed; the worker's log says why", "parameter": None}

    async def _answered(self, request: object) -> Reply:
        operation = request.get("operation") if isinstance(request, dict) else None
        body = request.get("body") if isinstance(request, dict) else None
        match operation:
            case "models":
                return self._described()
            case "tokenize":
                return await self._one_at_a_time(self._tokenize, _read(body, Tokenize))
            case "detokenize":
                return await self._one_at_a_time(self._detokenize, _read(body, Detokenize))
        raise InvalidRequest(f"{operation!r} is not an operation")

    def _described(self) -> Reply:
        card = {} if self._worker is None else msgspec.to_builtins(self._worker)
        return {**card, "models": list(self._names()), "converts": self._has_tokens is not None}

    @property
    def _tokens(self) -> Tokens:
        if self._has_tokens is None:
            raise InvalidRequest("this model has no tokenizer here", parameter="model")
        return self._has_tokens

    async def _one_at_a_time(self, work: Callable[[Any], Any], body: Tokenize | Detokenize) -> Reply:
        if body.model is not None and body.model not in self._names():
            raise UnknownModel(f"this worker has no model {body.model!r}", parameter="model")
        if self._waiting >= MOST_WAITING:
            raise Busy("too many requests for tokens; try again")
        self._waiting += 1
        try:
            async with self._turn:
                made: Reply = await work(body)
                return made
        finally:
            self._waiting -= 1

    async def _tokenize(self, body: Tokenize) -> Reply:
        if body.prompt is not None:
            _refuse_longer(len(body.prompt), "prompt")
            special = body.add_special_tokens is not False
            ids = await self._tokens.of_text(body.prompt, add_special_tokens=special)
        elif body.messages is not None:
            ids = await self._chat(body, body.messages)
        else:
            raise InvalidRequest("give a prompt or messages", parameter="prompt")
        strings = await asyncio.to_thread(self._tokens.strings, ids) if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self._context_length,
            "tokens": ids,
            "token_strs": strings,
        }

    async def _chat(self, body: Tokenize, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        arguments = body.chat_template_kwargs or {}
        if body.chat_template is not None or _NOT_FOR_CLIENTS & set(arguments):
            raise InvalidRequest(
                "clients may not replace the worker's template or set arguments of its tokenizer",
                parameter="chat_template" if body.chat_template is not None else "chat_template_kwargs",
            )
        if body.continue_final_message and body.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                parameter="continue_final_message",
            )
        _refuse_longer(len(msgspec.json.encode([messages, body.tools])), "messages")
        _refuse_media(messages)
        kwargs = {
            **arguments,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": body.continue_final_message,
        }
        return await self._tokens.of_chat(
            messages,
            body.tools,
            {"template": self._template, "kwargs": kwargs},
            add_special_tokens=body.add_special_tokens is True,
        )

    async def _detokenize(self, body: Detokenize) -> Reply:
        if len(body.tokens) > MOST_TOKENS:
            raise InvalidRequest(f"there are more than {MOST_TOKENS} tokens", parameter="tokens")
        if any(not 0 <= token < 1 << 31 for token in body.tokens):
            raise InvalidRequest("a token is a number from 0", parameter="tokens")
        return {"prompt": await self._tokens.text(body.tokens)}


def _read(body: object, shape: type[Any]) -> Any:
    try:
        return msgspec.convert(body, shape)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(describe(exc)) from None


def _refuse_longer(length: int, parameter: str) -> None:
    if length > MOST_CHARACTERS:
        raise InvalidRequest(f"longer than {MOST_CHARACTERS} characters", parameter=parameter)


def _refuse_media(messages: Sequence[Mapping[str, Any]]) -> None:
    """vLLM would fetch it, from anywhere."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            kinds = (*part, part.get("type")) if isinstance(part, dict) else ()
            if any(isinstance(kind, str) and name in kind for kind in kinds for name in _MEDIA):
                raise InvalidRequest("only text is tokenised here", parameter="messages")
