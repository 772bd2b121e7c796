"""Pipelines of vLLM-Omni through the whole stack, beside bare AsyncOmni; exits 1 when something is wrong.

    python scripts/gpu/omni.py [--only pictures,rate,…] [--json FILE] [--logs FOLDER]

Makes its models itself, with random weights. In under six minutes on one GPU:
  pictures    a tiny Stable Diffusion over HTTP: sizes, seeds, several, chat, eight users, refusals, a client
              that leaves
  rate        pictures per second through HTTP and of AsyncOmni alone, in turn: at least 0.95
  killed      a killed stage ends its worker within five seconds
  native      a Qwen-Image of real width with two layers, drawn by vLLM-Omni's own pipeline
  text        a language model as a stage: word for word what plain vLLM says to 20 prompts
  stages      a text stage that rewrites what a drawing stage draws
  video       a tiny pipeline for videos, to an MP4 file
A step that fails shows its traceback and the others go on; what is known so far is in the JSON file. Runs
without a GPU too, with vllm-omni-cpu, on smaller models. Steps that would begin after --budget-seconds are
left out.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import importlib.util
import io
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx
import psutil
from native_image import REAL_WIDTH, TINY, make_native_image_model
from tiny_models.image import make_tiny_image_model, make_tiny_video_model

from dynamo_vllm.engine.machine import device
from dynamo_vllm.models.tiny import make_tiny_model
from harness.bad_pictures import BAD_PICTURES
from harness.processes import kill_tree, survivors
from harness.stack import Stack, Worker, environment, stack
from harness.waiting import until

LEAST_SHARE = 0.95
START_SECONDS = 240.0
LONG = 900
"""Steps of a picture that nobody waits for to its end."""
PROMPTS = [
    f"{word} {n}" for n in range(4) for word in ("The quick", "once upon", "hello", "cat and", "1 2 3")
]


@dataclass
class Report:
    """What was found, printed as it comes and kept in a file."""

    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def check(self, name: str, fine: bool, figure: object = "") -> None:
        seconds = round(time.monotonic() - self.began, 1)
        self.rows.append({"name": name, "ok": bool(fine), "figure": figure, "at_seconds": seconds})
        print(f"{seconds:6.1f} s  {'ok   ' if fine else 'WRONG'}  {name}  {figure}", flush=True)
        if self.path is not None:
            self.path.write_text(json.dumps(self.rows, indent=1, default=str) + "\n")

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A failure is shown and does not end the others."""
        began = time.monotonic()
        try:
            yield
        except Exception as exc:
            traceback.print_exc()
            self.check(name, False, f"{type(exc).__name__}: {exc}")
        else:
            self.check(name, True, f"done in {time.monotonic() - began:.1f} s")

    @property
    def problems(self) -> int:
        return sum(not row["ok"] for row in self.rows)


class Bench:
    """Everything the steps share: the stack, and workers that are started when they are needed, or ahead."""

    def __init__(self, report: Report, made: Stack, folder: Path, options: argparse.Namespace) -> None:
        self.report, self.made, self.folder, self.options = report, made, folder, options
        self.on_gpu = device() != "cpu"
        self.alone: Alone | None = None
        self._started: dict[str, Worker] = {}

    def ahead(self, names: Sequence[str]) -> None:
        """All at once where there are cores for it; each takes a share of the GPU that is said beforehand."""
        for name in names:
            if name not in self._started:
                model, *flags = WORKERS[name](self)
                named = ["--model", str(model), "--served-model-name", name, "--component", name]
                env = own_environment(self.folder)
                self._started[name] = self.made.start_worker(*named, *map(str, flags), env=env)

    def worker(self, name: str) -> Worker:
        """One that answers."""
        began = time.monotonic()
        self.ahead([name])
        worker = self._started[name]
        until(f"{name} ready", lambda: self.made._alive(worker) and worker.is_ready(), START_SECONDS)
        until(f"{name} listed", lambda: name in self.made.get("/v1/models").text, 30)
        self.report.check(f"{name} is served", True, f"after {time.monotonic() - began:.1f} s of waiting")
        return worker

    def end(self, name: str) -> None:
        worker = self._started.pop(name, None)
        if worker is not None:
            kill_tree(worker.pid)
            worker.process.wait(20)

    def draw(self, **body: Any) -> httpx.Response:
        asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": 2, **body}
        return self.made.post("/v1/images/generations", asked)


def main() -> int:
    options = arguments().parse_args()
    if options.bare:
        asyncio.run(bare(options))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a time limit: nothing may be left running
    report = Report(Path(options.json) if options.json else None)
    chosen = options.only.split(",") if options.only else list(STEPS)
    with contextlib.ExitStack() as after:
        folder = Path(options.logs or after.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        made = after.enter_context(stack(folder))
        made.start_frontend()
        bench = Bench(report, made, folder, options)
        options.size = options.size or ("256x256" if bench.on_gpu else "64x64")
        options.steps = options.steps or (8 if bench.on_gpu else 4)
        if "rate" in chosen:
            bench.alone = Alone(folder, options)  # it starts while others do
            after.callback(bench.alone.end)
        for at, name in enumerate(chosen):
            if time.monotonic() - report.began > options.budget_seconds:
                report.check(name, False, "left out: no time")
                continue
            needs, act = STEPS[name]
            if bench.on_gpu and name not in QUIET:
                bench.ahead([worker for later in chosen[at:] for worker in STEPS[later][0]])
            with report.step(name):
                act(bench)
            still = {worker for later in chosen[at + 1 :] for worker in STEPS[later][0]}
            for worker in set(needs) - still:
                bench.end(worker)
    print(f"{len(report.rows)} checks, {report.problems} of them wrong")
    return int(report.problems > 0)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="steps by name, with commas")
    parser.add_argument("--json", help="where the results go")
    parser.add_argument("--logs", help="keep the models and logs here")
    parser.add_argument("--budget-seconds", type=float, default=320)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4, help="of the rate, each way")
    parser.add_argument("--seconds", type=float, default=8, help="of a round")
    parser.add_argument("--size", help="of the pictures whose rate is measured")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    return parser


def own_environment(folder: Path) -> dict[str, str]:
    """On top of the harness's: vLLM variables that were given, and our plugin where nothing is installed."""
    made = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    if importlib.util.find_spec("flashinfer") is None:
        made.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    with contextlib.suppress(metadata.PackageNotFoundError):
        metadata.version("dynamo-vllm")
        return made
    # vLLM finds plugins by the metadata of packages; with `src` on the path alone there is none of ours.
    info = folder / "installed" / "dynamo_vllm-0.dist-info"
    if not info.is_dir():
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dynamo-vllm\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ndynamo_vllm = dynamo_vllm.engine.patches.plugin:register\n"
        )
    return {**made, "PYTHONPATH": os.pathsep.join([str(info.parent), os.environ.get("PYTHONPATH", "")])}


# --- pictures -------------------------------------------------------------------------------------------


def pictures(answer: httpx.Response) -> list[bytes]:
    if answer.status_code != 200:
        raise AssertionError(f"HTTP {answer.status_code}: {answer.text[:300]}")
    return [base64.b64decode(item["b64_json"]) for item in answer.json()["data"]]


def size_of(content: bytes) -> tuple[str | None, int, int]:
    from PIL import Image

    image = Image.open(io.BytesIO(content))
    image.load()
    return image.format, image.width, image.height


def is_near(some: list[bytes], others: list[bytes]) -> bool:
    """The same picture; drawn in a batch, numbers may be rounded differently."""
    import numpy as np
    from PIL import Image

    a, b = (np.asarray(Image.open(io.BytesIO(content)), dtype=float) for (content,) in (some, others))
    return a.shape == b.shape and float(abs(a - b).mean()) < 4


def show_pictures(bench: Bench) -> None:
    check, draw = bench.report.check, bench.draw
    bench.worker("painter")
    for size in ("64x64", "128x64"):
        (content,) = pictures(draw(size=size))
        kind, width, height = size_of(content)
        check(f"a PNG of {size}", (kind, f"{width}x{height}") == ("PNG", size), f"{len(content)} bytes")
    first, again, other = (pictures(draw(seed=seed)) for seed in (1, 1, 2))
    check("same seed, same bytes", first == again)
    check("other seed, other bytes", first != other)
    two = pictures(draw(n=2, seed=3))
    check("n=2", len(set(two)) == 2)
    chat = {
        "model": "painter",
        "messages": [{"role": "user", "content": "a cat"}],
        "seed": 1,
        "mm_processor_kwargs": {"size": "64x64", "num_inference_steps": 2},
    }
    content = bench.made.post("/v1/chat/completions", chat).json()["choices"][0]["message"]["content"]
    url = content[0]["image_url"]["url"]
    check("chat", base64.b64decode(url.partition(",")[2]) == first[0])
    streamed = bench.made.post("/v1/chat/completions", {**chat, "stream": True}).text
    check("chat, streamed", url in streamed)
    with ThreadPoolExecutor(8) as users:
        together = list(users.map(lambda seed: pictures(draw(seed=seed)), range(8)))
    alone = [pictures(draw(seed=seed)) for seed in range(8)]
    check("8 users get their own", all(map(is_near, together, alone)), f"{together == alone=}")
    check("8 users get different ones", len({made[0] for made in together}) == 8)
    for change, named in BAD_PICTURES:
        answer = draw(**change)
        fine = answer.status_code == 400 and named in answer.text
        check(f"refused: {json.dumps(change)[:60]}", fine, f"HTTP {answer.status_code}")
    check("alive afterwards", bool(pictures(draw())))
    with contextlib.suppress(httpx.ReadTimeout):
        asked = {"model": "painter", "prompt": "a cat", "size": "64x64", "num_inference_steps": LONG}
        httpx.post(f"{bench.made.url}/v1/images/generations", json=asked, timeout=1.5)
        raise AssertionError(f"{LONG} steps took less than 1.5 s: nobody left")
    began = time.monotonic()
    pictures(draw(num_inference_steps=1))
    idle = time.monotonic() - began
    check("a client left: the stage is free", idle < 1.5, f"next picture after {idle:.2f} s")


def kill_a_stage(bench: Bench) -> None:
    ends_with_a_stage(bench, bench.worker("painter"), "a killed stage")


def ends_with_a_stage(bench: Bench, worker: Worker, name: str) -> None:
    below = psutil.Process(worker.pid).children(recursive=True)
    stage = next(p for p in below if "resource_tracker" not in " ".join(p.cmdline()))
    began = time.monotonic()
    os.kill(stage.pid, signal.SIGKILL)
    code = worker.process.wait(60)
    seconds = time.monotonic() - began
    bench.report.check(f"{name} ends its worker", code == 3 and seconds < 5, f"{code}, {seconds:.1f} s")
    left = survivors(below, 10)
    bench.report.check(f"{name}: nothing is left", not left, [process.pid for process in left])


# --- the rate -------------------------------------------------------------------------------------------


def measure_rate(bench: Bench) -> None:
    """Rounds in turn, A B B A …; both are up all the time, so that both disturb the other alike."""
    options, alone = bench.options, bench.alone
    assert alone is not None
    bench.worker("painter")
    sides: dict[str, Callable[[], float]] = {"alone": alone.round, "through": lambda: through(bench)}
    for side in sides.values():
        side()  # the first pictures of a process take longer
    found: dict[str, list[float]] = {"alone": [], "through": []}
    for number in range(options.rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            found[name].append(sides[name]())
        pair = {name: round(rates[-1], 2) for name, rates in found.items()}
        print(f"          round {number + 1}: {pair} pictures/s", flush=True)
    alone.end()
    shares = [ours / bare for ours, bare in zip(found["through"], found["alone"], strict=True)]
    whole = sum(found["through"]) / sum(found["alone"])
    bench.report.check(
        f"{LEAST_SHARE} of bare AsyncOmni ({options.users} users, {options.size}, {options.steps} steps)",
        statistics.median(shares) >= LEAST_SHARE,
        {
            "median": round(statistics.median(shares), 3),
            "rounds": [round(share, 3) for share in shares],
            "all": round(whole, 3),
            "alone": [round(rate, 2) for rate in found["alone"]],
            "through": [round(rate, 2) for rate in found["through"]],
        },
    )


def through(bench: Bench) -> float:
    return asyncio.run(_through(bench.made.url, bench.options))


async def _through(url: str, options: argparse.Namespace) -> float:
    body = {"model": "painter", "prompt": "a cat", "size": options.size, "num_inference_steps": options.steps}
    limits = httpx.Limits(max_connections=options.users)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits, trust_env=False) as client:

        async def draw(seed: int) -> None:
            answer = await client.post("/v1/images/generations", json={**body, "seed": seed})
            answer.raise_for_status()
            assert answer.json()["data"][0]["b64_json"]

        return await rate(draw, options)


async def rate(draw: Callable[[int], Any], options: argparse.Namespace) -> float:
    """Pictures per second of so many users that ask again as soon as they have theirs."""
    done = 0
    began = time.monotonic()

    async def user(first: int) -> None:
        nonlocal done
        seed = first
        while time.monotonic() - began < options.seconds:
            await draw(seed)
            done, seed = done + 1, seed + options.users

    await asyncio.gather(*(user(first) for first in range(options.users)))
    return done / (time.monotonic() - began)


class Alone:
    """AsyncOmni in a process of its own, with the settings that our worker gives it."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        model = make_tiny_image_model(folder / "tiny-sd")
        given = {name: getattr(options, name) for name in ("users", "seconds", "size", "steps")}
        words = [f"--{name}={value}" for name, value in given.items()]
        self._log = folder / "alone.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--bare", f"--model={model}", *words],
                env={**environment(folder), **own_environment(folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                text=True,
            )

    def end(self) -> None:
        kill_tree(self._process.pid)
        self._process.wait(10)

    def round(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # vLLM writes there too
            if line.startswith(FIGURE):
                return float(line.removeprefix(FIGURE))
        raise AssertionError(f"AsyncOmni alone ended:\n{self._log.read_text()[-3000:]}")


FIGURE = "pictures per second: "


async def bare(options: argparse.Namespace) -> None:
    """The same pipeline with the same settings, asked as its documentation does; a round for each line."""
    from dynamo_vllm.engine.omni import arguments as omni_arguments
    from dynamo_vllm.engine.omni import pipelines as omni_pipelines
    from dynamo_vllm.engine.patches import plugin
    from dynamo_vllm.engine.settings import EngineSettings

    logging.disable(logging.INFO)
    settings = EngineSettings(model=options.model, omni=True, environment=dict(os.environ))
    omni_arguments.set_environment(settings, omni_pipelines.choose(options.model))
    from vllm_omni.entrypoints.async_omni import AsyncOmni
    from vllm_omni.inputs.data import OmniDiffusionSamplingParams

    plugin.register_omni()
    pipeline = omni_pipelines.resolve(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        omni = AsyncOmni(**omni_arguments.arguments(settings, pipeline, scratch))
        omni.log_stats = False
    width, height = (int(side) for side in options.size.split("x"))
    numbers = iter(range(10**9))

    async def draw(seed: int) -> None:
        params = OmniDiffusionSamplingParams(
            width=width, height=height, num_inference_steps=options.steps, seed=seed
        )
        async for result in omni.generate(
            {"prompt": "a cat"}, request_id=f"r{next(numbers)}", sampling_params_list=[params]
        ):
            drawn = result
        assert drawn.images

    while await asyncio.to_thread(sys.stdin.readline):
        print(f"\n{FIGURE}{await rate(draw, options)}", flush=True)
    omni.shutdown()


# --- other pipelines ------------------------------------------------------------------------------------


def draw_native(bench: Bench) -> None:
    """vLLM-Omni's own Qwen-Image."""
    bench.worker("native")
    size = "512x512" if bench.on_gpu else "64x64"

    def native(seed: int) -> bytes:
        return pictures(bench.draw(model="native", size=size, seed=seed))[0]

    first, again, other = native(1), native(1), native(2)
    kind, width, height = size_of(first)
    bench.report.check(
        f"native: a PNG of {size}", (kind, f"{width}x{height}") == ("PNG", size), f"{len(first)} bytes"
    )
    bench.report.check("native: seeds", first == again and first != other)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as users:
        drawn = list(users.map(native, range(8)))
    seconds = time.monotonic() - began
    bench.report.check("native: 4 users", len(set(drawn)) == 8, f"{8 / seconds:.2f} pictures/s of 2 steps")


def compare_text(bench: Bench) -> None:
    """One prompt at a time: in a batch a GPU may round differently."""
    answers = {}
    for name in ("plain", "writer"):
        bench.worker(name)
        answers[name] = [said(bench, name, prompt) for prompt in PROMPTS]
    same = sum(a == b for a, b in zip(answers["plain"], answers["writer"], strict=True))
    bench.report.check("text equals plain vLLM", same == len(PROMPTS), f"{same} of {len(PROMPTS)}")
    bench.report.check("texts differ", len(set(answers["writer"])) > 10)


def said(bench: Bench, name: str, prompt: str) -> str:
    body = {"model": name, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    return str(bench.made.post("/v1/completions", body).json()["choices"][0]["text"])


def rewrite(bench: Bench) -> None:
    worker = bench.worker("studio")
    answer = bench.draw(model="studio", seed=1)
    (content,) = pictures(answer)
    bench.report.check("two stages: a picture", size_of(content)[1:] == (64, 64))
    revised = answer.json()["data"][0].get("revised_prompt")
    bench.report.check("two stages: the prompt was rewritten", bool(revised))
    bench.report.check(
        "two stages: another prompt, another picture",
        pictures(bench.draw(model="studio", seed=1, prompt="a dog")) != [content],
    )
    ends_with_a_stage(bench, worker, "two stages: a killed one")


def film(bench: Bench) -> None:
    import av

    bench.worker("filmer")
    settings = {"num_frames": 4, "fps": 8, "num_inference_steps": 1, "seed": 1}
    body = {"model": "filmer", "prompt": "a cat", "size": "64x64", "nvext": settings}
    (content,) = pictures(bench.made.post("/v1/videos", body))
    with av.open(io.BytesIO(content)) as file:
        (stream,) = file.streams.video
        shape = [stream.width, stream.height, len(list(file.decode(stream)))]
    bench.report.check("video: an MP4 of four frames", shape == [64, 64, 4], shape)


# --- which workers there are, and who needs them --------------------------------------------------------

TEXT = {"max_model_len": 1024, "kv_cache_memory_bytes": 2**30, "gpu_memory_utilization": 0.2}
"""With a cache of a given size vLLM does not care what others take of the GPU while it starts."""


def text_flags() -> list[str]:
    return [
        "--enforce-eager",
        *(word for name, value in TEXT.items() for word in (f"--{name.replace('_', '-')}", str(value))),
    ]


def painter(bench: Bench) -> list[object]:
    return [make_tiny_image_model(bench.folder / "tiny-sd"), "--omni", "--max-picture-steps", LONG]


def native(bench: Bench) -> list[object]:
    shape, dtype = (REAL_WIDTH, "bfloat16") if bench.on_gpu else (TINY, "float32")
    model = make_native_image_model(bench.folder / "qwen-image", shape, dtype)
    return [model, "--omni", "--dtype", dtype, "--enforce-eager"]


def plain(bench: Bench) -> list[object]:
    return [make_tiny_model(bench.folder / "tiny"), *text_flags()]


def writer(bench: Bench) -> list[object]:
    return [make_tiny_model(bench.folder / "tiny"), "--omni", *text_flags()]


def studio(bench: Bench) -> list[object]:
    stages = bench.folder / "stages.json"  # which is YAML too
    first = {"stage_id": 0, "enforce_eager": True, **TEXT, "default_sampling_params": {"max_tokens": 24}}
    stages.write_text(json.dumps({"pipeline": "dynamo_rewrite", "stages": [first, {"stage_id": 1}]}))
    model = make_tiny_image_model(bench.folder / "tiny-sd-rewriter", rewriter=True)
    return [model, "--omni", "--stage-configs-path", stages]


def filmer(bench: Bench) -> list[object]:
    return [make_tiny_video_model(bench.folder / "tiny-video"), "--omni"]


WORKERS = {made.__name__: made for made in (painter, native, plain, writer, studio, filmer)}
STEPS: dict[str, tuple[tuple[str, ...], Callable[[Bench], None]]] = {
    "pictures": (("painter",), show_pictures),
    "rate": (("painter",), measure_rate),
    "killed": (("painter",), kill_a_stage),
    "native": (("native",), draw_native),
    "text": (("plain", "writer"), compare_text),
    "stages": (("studio",), rewrite),
    "video": (("filmer",), film),
}
QUIET = ("pictures", "rate")
"""Nothing else runs beside these."""


if __name__ == "__main__":
    sys.exit(main())
