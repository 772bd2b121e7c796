"""Tokenises texts, pairs and chats for pooling models, many at a time."""

from __future__ import annotations

import asyncio
import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.pooling.scoring.io_processor import ScoringIOProcessors
from vllm.renderers import ChatParams, TokenizeParams

from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import PooledPrompt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.engine.vllm.names import Config, Renderer
    from dynamo_vllm.job import TextOptions

AT_ONCE = 64
"""Texts in one call of the tokenizer: its only thread serves other requests in between."""


class VllmPoolingPrompts:
    """Uses vLLM's tokenizer with vLLM's own settings for it, in vLLM's thread for it."""

    def __init__(self, renderer: Renderer, config: Config, template: str | None, scoring: str | None) -> None:
        self._renderer = renderer
        self._model = config.model_config
        self._template = template
        pooler = self._model.pooler_config
        self._longest: int = getattr(pooler, "max_embed_len", None) or self._model.max_model_len
        self._pairs: Any = None
        if scoring == "cross-encoder":
            # vLLM's class for these settings has another place in 0.32.
            template_config = SimpleNamespace(
                chat_template=template,
                chat_template_content_format="auto",
                trust_request_chat_template=False,
            )
            self._pairs = ScoringIOProcessors[scoring](
                vllm_config=config, renderer=renderer, chat_template_config=template_config
            )

    async def of_texts(self, texts: Sequence[str], options: TextOptions) -> list[PooledPrompt]:
        params = self._params(options)
        return await self._in_parts(functools.partial(self._texts, params=params), texts)

    def of_ids(self, prompts: Sequence[Sequence[int]], options: TextOptions) -> list[PooledPrompt]:
        params = self._params(options)
        tokenizer = self._renderer.get_tokenizer()
        return [
            PooledPrompt(_shortened(params, tokenizer, list(ids), number))
            for number, ids in enumerate(prompts)
        ]

    async def of_pairs(self, pairs: Sequence[tuple[str, str]], options: TextOptions) -> list[PooledPrompt]:
        work = functools.partial(self._texts_of_pairs, options=options, params=self._params(options))
        return await self._in_parts(work, pairs)

    async def of_chat(self, messages: Sequence[Mapping[str, Any]], options: TextOptions) -> PooledPrompt:
        kwargs = {"add_generation_prompt": False, **options.template_kwargs}
        params = ChatParams(chat_template=self._template, chat_template_kwargs=kwargs)
        try:
            _, prompt = await self._renderer.render_messages_async(list(messages), params)
            made = await self._renderer.tokenize_prompt_async(prompt, self._params(options))
        except Exception as exc:
            raise _refusal(exc, "messages") from exc
        return PooledPrompt(list(made["prompt_token_ids"]))

    # --- in the renderer's thread ------------------------------------------------------------------------

    async def _in_parts(
        self, work: Callable[[Sequence[Any], int], list[PooledPrompt]], items: Sequence[Any]
    ) -> list[PooledPrompt]:
        """Converts some items at a time; other requests have their turn in between."""
        loop, executor = asyncio.get_running_loop(), self._renderer._executor
        made: list[PooledPrompt] = []
        for first in range(0, len(items), AT_ONCE):
            made += await loop.run_in_executor(executor, work, items[first : first + AT_ONCE], first)
        return made

    def _texts(self, texts: Sequence[str], first: int, *, params: TokenizeParams) -> list[PooledPrompt]:
        tokenizer = self._renderer.get_tokenizer()
        ready = []
        for number, text in enumerate(texts, start=first):
            try:
                ready.append(params.apply_pre_tokenization(tokenizer, {"prompt": text})["prompt"])
            except Exception as exc:
                raise _refusal(exc, f"input[{number}]") from exc
        kwargs = params.get_encode_kwargs()
        if getattr(tokenizer, "is_fast", False):
            found = tokenizer(ready, return_attention_mask=False, return_token_type_ids=False, **kwargs)
            all_ids = found["input_ids"]
        else:
            all_ids = [tokenizer.encode(text, **kwargs) for text in ready]
        return [
            PooledPrompt(_shortened(params, tokenizer, list(ids), number))
            for number, ids in enumerate(all_ids, start=first)
        ]

    def _texts_of_pairs(
        self, pairs: Sequence[tuple[str, str]], first: int, *, options: TextOptions, params: TokenizeParams
    ) -> list[PooledPrompt]:
        scorer, tokenizer = self._pairs, self._renderer.get_tokenizer()
        is_plain = (
            self._template is None
            and not scorer.supports_score_template
            and scorer.use_sep_token
            and getattr(tokenizer, "is_fast", False)
            and not options.query_tokens
            and not options.document_tokens
        )
        if is_plain:
            queries, documents = [one for one, _ in pairs], [other for _, other in pairs]
            found = tokenizer(
                text=queries,
                text_pair=documents,
                return_attention_mask=False,
                **params.get_encode_kwargs(),
            )
            types = found.get("token_type_ids") or [None] * len(pairs)
            return [
                _pair(params, tokenizer, list(ids), kinds, number)
                for number, (ids, kinds) in enumerate(zip(found["input_ids"], types, strict=True), first)
            ]
        made = []
        for number, (query, document) in enumerate(pairs, start=first):
            try:
                _, prompt = scorer.get_score_prompt(
                    data_1=query,
                    data_2=document,
                    encode_kwargs=params.get_encode_kwargs(),
                    chat_template=self._template,
                    max_tokens_per_query=options.query_tokens,
                    max_tokens_per_doc=options.document_tokens,
                    chat_template_kwargs=dict(options.template_kwargs) or None,
                )
            except Exception as exc:
                raise _refusal(exc, f"documents[{number}]") from exc
            kinds = prompt.get("token_type_ids")
            made.append(_pair(params, tokenizer, list(prompt["prompt_token_ids"]), kinds, number))
        return made

    def _params(self, options: TextOptions) -> TokenizeParams:
        side = None if options.keep_end is None else "left" if options.keep_end else "right"
        encoder = self._model.encoder_config or {}
        return TokenizeParams(
            max_total_tokens=self._longest,
            max_output_tokens=0,
            truncate_prompt_tokens=options.keep,
            truncation_side=side,
            do_lower_case=encoder.get("do_lower_case", False),
            add_special_tokens=options.special_tokens,
        )


def _shortened(params: TokenizeParams, tokenizer: Any, ids: list[int], number: int) -> list[int]:
    try:
        made = params.apply_post_tokenization(tokenizer, {"prompt_token_ids": ids})
    except Exception as exc:
        raise _refusal(exc, f"input[{number}]") from exc
    found: list[int] = made["prompt_token_ids"]
    return found


def _pair(
    params: TokenizeParams, tokenizer: Any, ids: list[int], kinds: Sequence[int] | None, number: int
) -> PooledPrompt:
    try:
        made = params.apply_post_tokenization(tokenizer, {"prompt_token_ids": ids})["prompt_token_ids"]
    except Exception as exc:
        raise _refusal(exc, f"documents[{number}]") from exc
    if kinds is None:
        return PooledPrompt(made)
    side = params.truncation_side or tokenizer.truncation_side
    kept = list(kinds)[-len(made) :] if side == "left" else list(kinds)[: len(made)]
    return PooledPrompt(made, kept.index(1) if 1 in kept else len(kept))


def _refusal(exc: Exception, parameter: str) -> Exception:
    """Returns our error, with the item that vLLM refuses."""
    found = convert.error(exc)
    return InvalidRequest(str(found), parameter=parameter) if isinstance(found, InvalidRequest) else found
