"""Renders prompts for the text stage of a pipeline, and counts their tokens for the diffusion stage.

This module imports vLLM. So only `launch` imports it, after the variables are set and the patches applied.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.renderers import ChatParams

from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.vllm.parts.renderer import refusing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_omni.entrypoints.async_omni import AsyncOmni

logger = logging.getLogger(__name__)


class OmniRenderer:
    """Renders prompts. A rule refuses parsers with --omni, so answers are only text."""

    def __init__(self, omni: AsyncOmni) -> None:
        self._omni = omni

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]:
        params = ChatParams(
            chat_template=options.get("template"), chat_template_kwargs=options.get("kwargs", {})
        )
        with refusing("messages"):
            _, (rendered,) = await self._omni.renderer.render_chat_async([list(messages)], params)
        return list(rendered["prompt_token_ids"])

    async def render_text(self, prompt: str) -> list[int]:
        with refusing("prompt"):
            (rendered,) = await self._omni.renderer.render_cmpl_async([{"prompt": prompt}])
        return list(rendered["prompt_token_ids"])

    def answer_parser(self, body: object, template_kwargs: object) -> None:
        return None


def token_counter(model: str) -> Callable[[str], int] | None:
    """Returns a counter of tokens with the diffusion stage's tokenizer; None if it cannot be loaded."""
    from transformers import AutoTokenizer

    folder = Path(model, omni_arguments.tokenizer_folder(model))
    if not folder.is_dir():
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as exc:  # transformers raises many kinds: a missing library, a file of another version
        logger.warning("the length of prompts is not checked, the tokenizer cannot be loaded: %s", exc)
        return None
    return lambda text: len(tokenizer(text).input_ids)
