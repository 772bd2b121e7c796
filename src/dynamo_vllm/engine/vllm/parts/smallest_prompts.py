"""Makes the smallest prompts with media and with embeddings that a model takes."""

from __future__ import annotations

import io
from typing import Any

import pybase64
import torch

from dynamo_vllm.engine.base import SmallPrompts
from dynamo_vllm.engine.vllm.parts import media as vllm_media

_ROWS = 8


def prompts(llm: Any) -> SmallPrompts:
    model = llm.vllm_config.model_config
    marks = {kind: _marks(llm.renderer, kind) for kind in vllm_media.limits(llm.renderer)}
    return SmallPrompts(marks, _embeds(model) if model.enable_prompt_embeds else None)


def _marks(renderer: Any, kind: str) -> list[int]:
    """As vLLM's own profiling has them: no chat template is needed."""
    text = renderer.mm_processor.dummy_inputs.get_dummy_text({kind: 1})
    return list(renderer.get_tokenizer().encode(text))


def _embeds(model: Any) -> str:
    buffer = io.BytesIO()
    torch.save(torch.zeros(_ROWS, model.get_inputs_embeds_size()), buffer)
    return pybase64.b64encode(buffer.getvalue()).decode()
