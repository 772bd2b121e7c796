"""Draws through vLLM-Omni, for scores of the folder as it is served.

On a CPU this needs a platform plugin for vLLM-Omni; the package itself knows accelerators only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.image.score import SEED, ImageScore, score_of

START_SECONDS = 240


def score(
    folder: Path, count: int, settings: Sequence[tuple[int, float]], dtype: str = "float32"
) -> list[ImageScore]:
    with asyncio.Runner() as runner, _engine(folder, dtype) as engine:

        def drawing(steps: int, guidance: float) -> Any:
            return lambda prompts: runner.run(_draw(engine, prompts, steps, guidance))

        return [score_of(drawing(*one), count, *one) for one in settings]


@contextmanager
def _engine(folder: Path, dtype: str) -> Iterator[Any]:
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    engine = AsyncOmni(
        model=str(folder),
        dtype=dtype,
        diffusion_load_format="diffusers",
        stage_init_timeout=START_SECONDS,
        init_timeout=START_SECONDS,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


async def _draw(engine: Any, prompts: Sequence[str], steps: int, guidance: float) -> NDArray[np.uint8]:
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    pictures = []
    for index, prompt in enumerate(prompts):
        asked = OmniDiffusionSamplingParams(
            num_inference_steps=steps, guidance_scale=guidance, seed=SEED + index
        )
        request_id = f"{steps}-{guidance}-{index}"
        outputs = [one async for one in engine.generate({"prompt": prompt}, asked, request_id=request_id)]
        pictures.append(np.asarray(outputs[-1].images[0]))
    return np.stack(pictures)
