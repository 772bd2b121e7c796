"""Pictures per second through the whole stack beside bare AsyncOmni; exits 1 when something is wrong.

    python scripts/gpu/omni.py [--model FOLDER] [--pictures 64] [--users 8] [--size 64x64] [--logs FOLDER]

Without --model it makes the tiny Stable Diffusion. Runs on CPU too, with vllm-omni-cpu. What is checked:
  - a picture has its size, and its seed decides its bytes
  - through HTTP at least 0.95 of the pictures per second that AsyncOmni makes alone, measured in turn
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import logging
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import httpx

from dynamo_vllm.models.tiny_image import make_tiny_image_model
from harness.stack import environment, stack
from harness.waiting import until

LEAST_SHARE = 0.95
START_SECONDS = 600.0
NAME = "painter"
FIGURE = "pictures per second: "


def main() -> int:
    options = arguments().parse_args()
    if options.bare:
        asyncio.run(bare(options))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(options.logs or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.model is None:
            options.model = str(make_tiny_image_model(folder / "tiny-sd"))
        alone = measured_alone(options, folder)
        through, problems = measured_through(options, folder)
    share = through / alone
    print(f"AsyncOmni alone   {alone:8.2f} pictures/s")
    print(f"through the stack {through:8.2f} pictures/s   {share:.2f} of it")
    if share < LEAST_SHARE:
        problems.append(f"{share:.2f} is below {LEAST_SHARE}")
    for problem in problems:
        print(f"WRONG: {problem}")
    return int(bool(problems))


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--pictures", type=int, default=64)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--size", default="64x64")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--logs")
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    return parser


# --- AsyncOmni alone, in a process of its own -----------------------------------------------------------


def measured_alone(options: argparse.Namespace, folder: Path) -> float:
    words = [f"--{name}={getattr(options, name)}" for name in ("model", "pictures", "users", "size", "steps")]
    with (folder / "alone.log").open("wb") as log:
        ran = subprocess.run(
            [sys.executable, __file__, "--bare", *words],
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=log,
            timeout=START_SECONDS + 10 * options.pictures,
        )
    if ran.returncode != 0:
        raise SystemExit(f"AsyncOmni alone failed, see {folder / 'alone.log'}")
    # vLLM writes into the same output.
    found = next(line for line in ran.stdout.decode().splitlines() if line.startswith(FIGURE))
    return float(found.removeprefix(FIGURE))


async def bare(options: argparse.Namespace) -> None:
    """The same pipeline with the same settings, started and asked as its own documentation does."""
    import os

    from dynamo_vllm.engine import omni_pipelines, omni_start, plugin
    from dynamo_vllm.engine.settings import EngineSettings

    logging.disable(logging.INFO)
    settings = EngineSettings(model=options.model, omni=True, environment=dict(os.environ))
    omni_start.set_environment(settings, omni_pipelines.choose(options.model))
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    plugin.register_omni()
    pipeline = omni_pipelines.resolve(options.model)
    omni_pipelines.register(pipeline)
    with tempfile.TemporaryDirectory() as scratch:
        omni = AsyncOmni(**omni_start.arguments(settings, pipeline, scratch))
        omni.log_stats = False
    width, height = (int(side) for side in options.size.split("x"))

    async def draw(number: int) -> None:
        params = OmniDiffusionSamplingParams(
            width=width, height=height, num_inference_steps=options.steps, seed=number
        )
        stages = [*omni.default_sampling_params_list[:-1], params]
        async for _ in omni.generate(
            {"prompt": "a cat"}, request_id=f"r{number}", sampling_params_list=stages
        ):
            pass

    async def user(numbers: range) -> None:
        for number in numbers:
            await draw(number)

    await draw(0)
    began = time.monotonic()
    await asyncio.gather(
        *(user(range(first, options.pictures, options.users)) for first in range(options.users))
    )
    print(f"\n{FIGURE}{options.pictures / (time.monotonic() - began)}", flush=True)
    omni.shutdown()


# --- through frontend and worker ------------------------------------------------------------------------


def measured_through(options: argparse.Namespace, folder: Path) -> tuple[float, list[str]]:
    with stack(folder) as made:
        made.start_frontend()
        worker = made.start_worker("--omni", "--model", options.model, "--served-model-name", NAME)
        until("the worker", lambda: made._alive(worker) and worker.is_ready(), START_SECONDS)
        until("the model", lambda: NAME in made.get("/v1/models").text, 30)
        # One for all: making one takes as long as a tiny picture.
        with httpx.Client(base_url=made.url, timeout=600) as client:
            problems = looked_at(client, options)
            began = time.monotonic()
            with ThreadPoolExecutor(options.users) as users:
                list(users.map(lambda seed: drawn(client, options, seed), range(options.pictures)))
            return options.pictures / (time.monotonic() - began), problems


def drawn(client: httpx.Client, options: argparse.Namespace, seed: int) -> bytes:
    body: dict[str, Any] = {"model": NAME, "prompt": "a cat", "size": options.size}
    body |= {"num_inference_steps": options.steps, "seed": seed}
    answer = client.post("/v1/images/generations", json=body)
    answer.raise_for_status()
    return base64.b64decode(answer.json()["data"][0]["b64_json"])


def looked_at(client: httpx.Client, options: argparse.Namespace) -> list[str]:
    import io

    from PIL import Image

    first, again, other = (drawn(client, options, seed) for seed in (1, 1, 2))
    width, height = Image.open(io.BytesIO(first)).size
    found = []
    if f"{width}x{height}" != options.size:
        found.append(f"a picture of {options.size} is {width}x{height}")
    if first != again:
        found.append("the same seed drew another picture")
    if first == other:
        found.append("another seed drew the same picture")
    return found


if __name__ == "__main__":
    sys.exit(main())
