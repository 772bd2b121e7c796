"""Runs bare AsyncLLM on images: returns its prompt ids and answer ids. Runs in a child of the zygote."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from cpu.bare import bare_engine


def run(model: str, chats_file: str, out_file: str, max_tokens: int) -> None:
    chats = json.loads(Path(chats_file).read_text())
    Path(out_file).write_text(json.dumps(asyncio.run(answers(model, chats, max_tokens))))


async def answers(model: str, chats: list[Any], max_tokens: int) -> list[dict[str, list[int]]]:
    from vllm import SamplingParams
    from vllm.renderers import ChatParams

    engine = bare_engine(model, limit_mm_per_prompt={"image": 2})
    found = []
    try:
        for number, messages in enumerate(chats):
            settings = ChatParams(chat_template_kwargs={"add_generation_prompt": True, "tokenize": True})
            _, (prompt,) = await engine.renderer.render_chat_async([messages], settings)
            params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
            async for result in engine.generate(prompt, params, f"image-{number}"):
                last = result
            found.append({"prompt": list(last.prompt_token_ids), "said": list(last.outputs[0].token_ids)})
    finally:
        engine.shutdown()
    return found
