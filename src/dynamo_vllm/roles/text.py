"""The aggregated role in text mode: the engine tokenises, OpenAI bodies in and OpenAI chunks out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm import wire_openai
from dynamo_vllm.codec import openai_chunks, prompt, sampling
from dynamo_vllm.config.role_cards import RoleCard
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Adapter, EngineFacts, Job
from dynamo_vllm.roles import media, trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.base import Renderer
    from dynamo_vllm.job import AnswerParser

# A request cannot move in this mode: the frontend has no tokens to send along.
CARD = RoleCard(worker_type="Aggregated", input="Text", may_migrate=False, router="round-robin")
# vLLM 0.30 passes them to the tokenizer: a prompt padded to a client's length uses all memory.
TOKENIZER_ARGUMENTS = frozenset(
    {
        "conversation",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "truncation",
    }
)


class AggregatedText:
    card = CARD

    def __init__(
        self,
        facts: EngineFacts,
        renderer: Renderer,
        names: Sequence[str],
        template: str | None = None,
        media_reader: media.Reader | None = None,
        hides_unwanted_tools: bool = True,
    ) -> None:
        self._facts = facts
        self._renderer = renderer
        self._names = names
        self._template = template
        self._media: media.Reader = media_reader or media.MediaReader(facts)
        self._hides_unwanted_tools = hides_unwanted_tools

    def parse(self, raw: object) -> wire_openai.Body:
        return wire_openai.parse(raw)

    def adapter(self, request: wire_openai.Body) -> str | None:
        if self._facts.adapters is None or request.model in self._names:
            return None
        return request.model

    async def prepare(self, request: wire_openai.Body, job_id: str, adapter: Adapter | None = None) -> Job:
        refuse_unavailable(request)
        extension, refs = wire_openai.parse_extension(request), media.of_text(request)
        if refs:
            self._media.refuse(refs)  # before the renderer, whose message is less clear
        ids: Sequence[int] = await self._tokens(request)
        parser = self._parser(request)
        prompt.check_ids(ids, self._facts.vocab_size)
        room = prompt.room_after(ids, self._facts.context_length)
        media_prompt = (
            await self._media.read(ids, refs, extension.cache_salt, job_id=job_id) if refs else None
        )
        if media_prompt is not None:
            ids = media_prompt.tokens
            room = prompt.room_after(ids, self._facts.context_length)
        return Job(
            job_id,
            ids,
            sampling.from_text(request, room, self._facts, parser),
            priority=-extension.priority,
            cache_salt=extension.cache_salt,
            adapter=adapter,
            media=media_prompt,
            parser=parser,
        )

    async def _tokens(self, body: wire_openai.Body) -> list[int]:
        if isinstance(body, wire_openai.ChatBody):
            return await self._chat_tokens(body)
        match body.prompt:
            case str() as text if text:
                return await self._renderer.render_text(text)
            case [str() as text]:
                return await self._renderer.render_text(text)
            case [int(), *_] as ids if all(isinstance(i, int) for i in ids):
                return list(ids)
            case [[int(), *_] as ids] if all(isinstance(i, int) for i in ids):
                return list(ids)
            case [] | "":
                raise InvalidRequest("the prompt is empty", parameter="prompt")
        raise InvalidRequest(
            "text mode takes one prompt, a string or a list of token ids", parameter="prompt"
        )

    async def _chat_tokens(self, body: wire_openai.ChatBody) -> list[int]:
        if not body.messages:
            raise InvalidRequest("there is no message", parameter="messages")
        arguments = template_kwargs(body)
        if {"chat_template", "tokenize"} & set(arguments):
            raise InvalidRequest(
                "clients may not replace the worker's template", parameter="chat_template_kwargs"
            )
        if not_for_templates := TOKENIZER_ARGUMENTS & set(arguments):
            raise InvalidRequest(
                f"{min(not_for_templates)} is an argument of the tokenizer, which clients may not set",
                parameter="chat_template_kwargs",
            )
        kwargs: dict[str, object] = {
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
            **arguments,
        }
        if body.tools and not (body.tool_choice == "none" and self._hides_unwanted_tools):
            kwargs["tools"] = body.tools
        messages = media.with_placeholders(body.messages)
        return await self._renderer.render_chat(messages, {"template": self._template, "kwargs": kwargs})

    def _parser(self, body: wire_openai.Body) -> AnswerParser | None:
        if not isinstance(body, wire_openai.ChatBody):
            return None
        return self._renderer.answer_parser(body, template_kwargs(body))

    def encoder(self, request: wire_openai.Body, job: Job) -> openai_chunks.TextEncoder:
        is_chat = isinstance(request, wire_openai.ChatBody)
        model = request.model or self._names[0]
        parser = job.parser
        parsers = [] if parser is None else [parser.choice(job.prompt) for _ in range(job.sampling.n)]
        return openai_chunks.TextEncoder(job.id, model, len(job.prompt), is_chat, parsers)

    def health_check(self) -> dict[str, object]:
        return {"prompt": "a", "max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "_HEALTH_CHECK": True}

    def trials(self, given: trials.TrialInputs) -> trials.Trials:
        return trials.of_text(self._facts, given)


def refuse_unavailable(body: wire_openai.Body) -> None:
    """Refuse what text mode does not support."""
    if isinstance(body, wire_openai.CompletionBody) and body.echo:
        raise InvalidRequest("text mode does not repeat the prompt", parameter="echo")
    if isinstance(body, wire_openai.CompletionBody) and body.prompt_embeds is not None:
        raise InvalidRequest("text mode takes text only", parameter="prompt_embeds")
    if body.prompt_logprobs is not None:
        raise InvalidRequest("text mode has no logprobs of the prompt", parameter="prompt_logprobs")


def template_kwargs(body: wire_openai.ChatBody) -> dict[str, object]:
    return {**(body.chat_template_args or {}), **(body.chat_template_kwargs or {})}
