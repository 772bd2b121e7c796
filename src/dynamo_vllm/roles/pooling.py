"""The pooling role: texts in; embeddings, classes or scores out."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from dynamo_vllm import wire_pooling
from dynamo_vllm.codec import pooling
from dynamo_vllm.codec.sampling import check_vocabulary
from dynamo_vllm.config.role_cards import CARDS, RoleCard
from dynamo_vllm.errors import InvalidRequest, TooLong
from dynamo_vllm.job import (
    Adapter,
    EngineFacts,
    Job,
    PooledPrompt,
    PoolingFacts,
    PoolingSpec,
    SamplingSpec,
    TextOptions,
)
from dynamo_vllm.roles import media
from dynamo_vllm.roles.trials import Trial, TrialInputs, Trials, lengths
from dynamo_vllm.wire_pooling import CLASSIFY, EMBEDDINGS, POOLING, RERANK, SCORE, InputBody, PairsBody

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dynamo_vllm.engine.base import PoolingPrompts
    from dynamo_vllm.roles.base import Encoder

VALUES_PER_OUTPUT = 1 << 16
"""Numbers in one chunk: more would keep the worker's event loop busy for too long."""
IDS_AT_ONCE = 1 << 16
"""Token ids that are checked on the event loop; more are checked in a thread."""
PAIRS_TASK = {"cross-encoder": "classify", "bi-encoder": "embed", "late-interaction": "token_embed"}
_NOT_FOR_CLIENTS = frozenset({"chat_template", "tokenize", "tools"})


def apis(facts: PoolingFacts) -> tuple[str, ...]:
    """Return the APIs of a model."""
    own = {"embed": (EMBEDDINGS,), "classify": (CLASSIFY,)}.get(facts.task, ())
    return (*own, POOLING, *((RERANK, SCORE) if facts.scoring else ()))


class Pooling:
    """Embeddings, classes, scores."""

    def __init__(
        self,
        facts: EngineFacts,
        prompts: PoolingPrompts,
        names: Sequence[str],
        media_reader: media.Reader | None = None,
        *,
        max_items: int,
    ) -> None:
        if facts.pooling is None:
            raise ValueError("the engine does not pool")
        self._facts = facts
        self._pooling = facts.pooling
        self._prompts = prompts
        self._names = names
        self._media: media.Reader = media_reader or media.MediaReader(facts)
        self._max_items = max_items

    @property
    def card(self) -> RoleCard:
        # The frontend does not serve scores; the gateway does.
        served = tuple(api for api in apis(self._pooling) if api != SCORE)
        return dataclasses.replace(CARDS["pooling"], endpoint_types=served)

    def parse(self, raw: object) -> wire_pooling.Body:
        return wire_pooling.parse(raw)

    def adapter(self, request: wire_pooling.Body) -> str | None:
        if self._facts.adapters is None or request.model in (None, *self._names):
            return None
        return request.model

    async def prepare(self, request: wire_pooling.Body, job_id: str, adapter: Adapter | None = None) -> Job:
        if isinstance(request, PairsBody):
            spec = await self._pairs(request)
        else:
            spec = await self._inputs(request, job_id)
        return Job(
            job_id,
            spec.prompts[0].tokens,
            SamplingSpec(max_tokens=1),
            priority=request.priority,
            cache_salt=request.cache_salt,
            adapter=adapter,
            pooling=spec,
        )

    # --- texts, token ids, chats -------------------------------------------------------------------------

    async def _inputs(self, body: InputBody, job_id: str) -> PoolingSpec:
        task = self._task(body)
        if body.encoding_format not in (None, "float", "base64"):
            raise InvalidRequest(
                f"{body.encoding_format!r} is unknown; use float or base64", parameter="encoding_format"
            )
        self._check_dimensions(body.dimensions, task)
        return PoolingSpec(
            task=task,
            prompts=await self._prompts_of(body, job_id),
            dimensions=body.dimensions,
            use_activation=body.use_activation,
            values_per_output=VALUES_PER_OUTPUT,
        )

    def _task(self, body: InputBody) -> str:
        pools = self._pooling
        wanted = {EMBEDDINGS: "embed", CLASSIFY: "classify"}.get(body.api, body.task or pools.task)
        if wanted not in pools.tasks:
            raise InvalidRequest(
                f"this model does not {wanted}; it does: {', '.join(pools.tasks)}",
                parameter="task" if body.api == POOLING and body.task else "model",
            )
        return wanted

    def _check_dimensions(self, wanted: int | None, task: str) -> None:
        if wanted is None:
            return
        pools = self._pooling
        if task not in ("embed", "token_embed") or pools.smaller is None:
            raise InvalidRequest("this model has embeddings of one length only", parameter="dimensions")
        if not 1 <= wanted <= pools.dimensions:
            raise InvalidRequest(f"{wanted} is not 1 to {pools.dimensions}", parameter="dimensions")
        if pools.smaller and wanted not in pools.smaller:
            allowed = ", ".join(str(one) for one in sorted(pools.smaller))
            raise InvalidRequest(f"{wanted} is not one of {allowed}", parameter="dimensions")

    async def _prompts_of(self, body: InputBody, job_id: str) -> Sequence[PooledPrompt]:
        if body.messages is not None:
            return [await self._chat(body, body.messages, job_id)]
        options = self._options(body, body.add_special_tokens is not False)
        match body.input:
            case None:
                raise InvalidRequest("is missing", parameter="input")
            case str() as text:
                return await self._texts([text], options)
            case []:
                raise InvalidRequest("is empty", parameter="input")
            case [str(), *_] as texts:
                return await self._texts(texts, options)
            case [int(), *_] as ids:
                return await self._ids([ids], options)
            case [list(), *_] as prompts:
                return await self._ids(prompts, options)
        raise InvalidRequest(
            "is a text, a list of texts, token ids, or a list of lists of token ids", parameter="input"
        )

    async def _texts(self, texts: list[Any], options: TextOptions) -> Sequence[PooledPrompt]:
        self._check_count(len(texts), "input")
        _check_texts(texts, "input")
        return self._checked(await self._prompts.of_texts(texts, options), "input")

    async def _ids(self, prompts: list[Any], options: TextOptions) -> Sequence[PooledPrompt]:
        self._check_count(len(prompts), "input")
        total = sum(len(ids) for ids in prompts if isinstance(ids, list))
        if total <= IDS_AT_ONCE:
            return self._prompts_of_ids(prompts, options)
        return await asyncio.to_thread(self._prompts_of_ids, prompts, options)

    def _prompts_of_ids(self, prompts: list[Any], options: TextOptions) -> Sequence[PooledPrompt]:
        for number, ids in enumerate(prompts):
            where = f"input[{number}]"
            if not isinstance(ids, list) or not all(type(one) is int for one in ids):
                raise InvalidRequest("is not a list of token ids", parameter=where)
            if not ids:
                raise InvalidRequest("is empty", parameter=where)
            check_vocabulary(where, ids, self._facts.vocab_size)
        return self._checked(self._prompts.of_ids(prompts, options), "input")

    async def _chat(self, body: InputBody, messages: Sequence[dict[str, Any]], job_id: str) -> PooledPrompt:
        if not messages:
            raise InvalidRequest("there is no message", parameter="messages")
        refs = media.of_messages(messages)
        if refs:
            self._media.refuse(refs)  # before the renderer, whose message is less clear
        options = self._options(body, body.add_special_tokens is True)
        made = await self._prompts.of_chat(media.with_placeholders(messages), options)
        if refs:
            read = await self._media.read(made.tokens, refs, body.cache_salt, job_id=job_id)
            made = PooledPrompt(read.tokens, media=read)
        return self._checked([made], "messages")[0]

    # --- pairs -------------------------------------------------------------------------------------------

    async def _pairs(self, body: PairsBody) -> PoolingSpec:
        scoring = self._pooling.scoring
        if scoring is None:
            raise InvalidRequest("this model does not score pairs of texts", parameter="model")
        queries = [body.query] if isinstance(body.query, str) else body.query
        self._check_count(len(body.documents), "documents")
        if not queries or not body.documents:
            raise InvalidRequest("is empty", parameter="documents" if queries else "query")
        if len(queries) not in (1, len(body.documents)):
            raise InvalidRequest(
                f"{len(queries)} queries for {len(body.documents)} documents; give one, or one each",
                parameter="query",
            )
        if body.top_n is not None and body.top_n < 1:
            raise InvalidRequest("is not 1 or more", parameter="top_n")
        _check_texts(queries, "query")
        _check_texts(body.documents, "documents")
        options = self._options(body, True)
        if scoring == "cross-encoder":
            each = queries * len(body.documents) if len(queries) == 1 else queries
            made = await self._prompts.of_pairs(list(zip(each, body.documents, strict=True)), options)
            pairs: list[tuple[int, int]] = []
        else:
            made = await self._prompts.of_texts([*queries, *body.documents], options)
            count = len(queries)
            pairs = [(min(i, count - 1), count + i) for i in range(len(body.documents))]
        return PoolingSpec(
            task=PAIRS_TASK[scoring],
            prompts=self._checked(made, "documents"),
            use_activation=body.use_activation,
            pairs=pairs,
        )

    # --- both --------------------------------------------------------------------------------------------

    def _options(self, body: InputBody | PairsBody, special_tokens: bool) -> TextOptions:
        keep, side, longest = body.truncate_prompt_tokens, body.truncation_side, self._pooling.longest
        if keep is not None and not (keep == -1 or 1 <= keep <= longest):
            raise InvalidRequest(
                f"{keep} is not 1 to {longest}, or -1 for as many as the model takes",
                parameter="truncate_prompt_tokens",
            )
        if side not in (None, "left", "right"):
            raise InvalidRequest(f"{side!r} is unknown; use left or right", parameter="truncation_side")
        kwargs = dict(body.chat_template_kwargs or {})
        if wrong := _NOT_FOR_CLIENTS & kwargs.keys():
            raise InvalidRequest(f"clients may not set {min(wrong)}", parameter="chat_template_kwargs")
        keep_end = None if side is None else side == "left"
        if isinstance(body, InputBody):
            return TextOptions(
                special_tokens=special_tokens, keep=keep, keep_end=keep_end, template_kwargs=kwargs
            )
        if body.instruction is not None:
            kwargs.setdefault("instruction", body.instruction)
        return TextOptions(
            keep=keep,
            keep_end=keep_end,
            query_tokens=self._kept(body.max_tokens_per_query, "max_tokens_per_query"),
            document_tokens=self._kept(body.max_tokens_per_doc, "max_tokens_per_doc"),
            template_kwargs=kwargs,
        )

    def _kept(self, tokens: int, parameter: str) -> int:
        if not 0 <= tokens < self._pooling.longest:
            raise InvalidRequest(
                f"{tokens} is not 0 to {self._pooling.longest - 1}; 0 keeps all", parameter=parameter
            )
        return tokens

    def _check_count(self, count: int, parameter: str) -> None:
        if count > self._max_items:
            raise InvalidRequest(
                f"has {count} items; a request may have {self._max_items}", parameter=parameter
            )

    def _checked(self, prompts: Sequence[PooledPrompt], parameter: str) -> Sequence[PooledPrompt]:
        longest = self._pooling.longest
        for number, prompt in enumerate(prompts):
            if len(prompt.tokens) > longest:
                raise TooLong(
                    f"has {len(prompt.tokens)} tokens; this model takes {longest}. "
                    "Shorten it, or set truncate_prompt_tokens to -1",
                    parameter=f"{parameter}[{number}]",
                )
            if not prompt.tokens:
                raise InvalidRequest("has no token", parameter=f"{parameter}[{number}]")
        return prompts

    def encoder(self, request: wire_pooling.Body, job: Job) -> Encoder:
        spec = job.pooling
        assert spec is not None  # `prepare` made it
        model, prompts = request.model or self._names[0], spec.prompts
        if isinstance(request, PairsBody):
            if request.is_named:
                return pooling.ScoresEncoder(prompts)
            return pooling.RankingEncoder(
                request.documents, request.top_n, request.return_documents is not False
            )
        wants_base64 = request.encoding_format == "base64"
        if request.api == EMBEDDINGS:
            return pooling.embeddings(model, prompts, wants_base64)
        if request.api == CLASSIFY:
            return pooling.classes(job.id, model, prompts, self._pooling.labels)
        return pooling.pooling(job.id, model, prompts, wants_base64)

    def health_check(self) -> dict[str, object]:
        return self._body([self._token()])

    def trials(self, given: TrialInputs) -> Trials:
        return Trials(Trial("plain", self.health_check()), longer=self._longer())

    def _longer(self) -> Iterator[Trial]:
        for length in lengths(self._facts):
            yield Trial(f"prompt of {length} tokens", self._body([self._token()] * length), length)

    def _body(self, ids: list[int]) -> dict[str, object]:
        return {
            wire_pooling.API: apis(self._pooling)[0],
            "input": [ids],
            "encoding_format": "base64",
            "_HEALTH_CHECK": True,
        }

    def _token(self) -> int:
        token = self._facts.bos_token_id
        return token if token is not None else 1


def _check_texts(texts: Sequence[Any], parameter: str) -> None:
    for number, text in enumerate(texts):
        where = f"{parameter}[{number}]"
        if not isinstance(text, str):
            raise InvalidRequest("is not a text, but others are", parameter=where)
        if not text:
            raise InvalidRequest("is empty", parameter=where)
