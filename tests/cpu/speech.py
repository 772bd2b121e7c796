"""Asks bare vLLM what is said in sounds, as the reference for transcriptions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from cpu.bare import bare_engine

PROMPTS = {
    False: "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>",
    True: "<|startoftranscript|><|en|><|transcribe|><|0.00|>",
}


def run(model: str, cases_file: str, out_file: str) -> None:
    """`cases_file` has names, files of samples as floats, and whether times are wanted."""
    asked = json.loads(Path(cases_file).read_text())
    Path(out_file).write_text(json.dumps(asyncio.run(answers(model, asked))))


async def answers(model: str, asked: dict[str, tuple[str, bool]]) -> dict[str, Any]:
    """Returns the text and the tokens of each."""
    engine = bare_engine(model, max_model_len=64)
    try:
        return {name: await answer(engine, name, *case) for name, case in asked.items()}
    finally:
        engine.shutdown()


async def answer(engine: Any, name: str, file: str, is_timed: bool) -> list[Any]:
    from vllm import SamplingParams

    prompt = {
        "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (np.load(file), 16_000)}},
        "decoder_prompt": {"prompt": PROMPTS[is_timed]},
    }
    texts, ids = [], []
    async for result in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=60), name):
        texts, ids = [result.outputs[0].text], list(result.outputs[0].token_ids)
    return [texts[0], ids]
