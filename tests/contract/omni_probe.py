"""Prints what our engine makes of vLLM-Omni's types, as JSON; in a separate process, as they patch vLLM."""

from __future__ import annotations

import asyncio
import io
import json
import os
import tempfile
import threading
import wave
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["DYN_VLLM_OMNI_ARCHITECTURE"] = "Qwen3ForCausalLM"
os.environ["DYN_VLLM_OMNI_STAGES"] = "1"

import msgspec
import torch
import zmq
from PIL import Image
from vllm import SamplingParams
from vllm.outputs import CompletionOutput
from vllm.v1.engine.exceptions import EngineDeadError
from vllm_omni.diffusion.models.diffusers_adapter import pipeline_diffusers_adapter as adapter
from vllm_omni.diffusion.stage_diffusion_client import StageDiffusionClient
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.outputs import OmniRequestOutput

from dynamo_vllm.engine.base import EngineParts
from dynamo_vllm.engine.omni import arguments as omni_arguments
from dynamo_vllm.engine.omni import engine as omni_engine
from dynamo_vllm.engine.omni import pipelines as omni_pipelines
from dynamo_vllm.engine.omni.convert import media_of
from dynamo_vllm.engine.omni.engine import OmniEngine
from dynamo_vllm.engine.patches import plugin
from dynamo_vllm.engine.patches.omni_text_stage import stage_class
from dynamo_vllm.engine.settings import EngineSettings
from dynamo_vllm.errors import EngineRequestFailed
from dynamo_vllm.job import EngineFacts, Job, Output, PipelineSpec, SamplingSpec

RED = Image.new("RGB", (8, 8), "red")


class Pipeline:
    """Replaces AsyncOmni and yields the results of a test case."""

    default_sampling_params_list = [SamplingParams(max_tokens=4), OmniDiffusionSamplingParams()]

    def __init__(self, results: list[Any]) -> None:
        self.results = results
        self.asked: dict[str, Any] = {}
        self.aborted: list[str] = []

    async def generate(self, prompt: Any, **asked: Any) -> AsyncIterator[Any]:
        self.asked = {"prompt": prompt, **asked}
        for result in self.results:
            if isinstance(result, Exception):
                raise result
            yield result

    async def abort(self, job_id: str, **_: Any) -> None:
        self.aborted.append(job_id)


def text(said: str, finish: str | None = "stop") -> OmniRequestOutput:
    choice = CompletionOutput(0, said, [1, 2], None, None, finish_reason=finish)
    return OmniRequestOutput(
        request_id="j", outputs=[choice], final_output_type="text", finished=finish is not None
    )


def image(count: int = 1, **more: Any) -> OmniRequestOutput:
    return OmniRequestOutput.from_diffusion("j", images=[RED] * count, **more)


FACTS = EngineFacts(
    context_length=1,
    vocab_size=1,
    block_size=16,
    total_kv_blocks=1,
    max_num_seqs=1,
    max_num_batched_tokens=1,
)


def engine_of(pipeline: Pipeline) -> OmniEngine:
    return OmniEngine(pipeline, FACTS, EngineParts(), lambda _: None)


SPEC = PipelineSpec(
    prompt="a cat", seed=7, n=2, width=8, height=16, steps=3, guidance=2.0, negative_prompt="dog"
)
CASES: dict[str, list[Any]] = {
    "picture": [image(2)],
    "text, then picture": [text("a cat in the sun"), image()],
    "nothing": [image(0)],
    "no output at all": [],
    "error": [OmniRequestOutput.from_error("j", "no memory")],
    "abort": [text("", "abort")],
    "sound": [
        image(0, multimodal_output={"audio": torch.zeros(480), "sr": 24000}, final_output_type="audio")
    ],
}


async def outcome(results: list[Any]) -> tuple[Any, Pipeline]:
    pipeline = Pipeline(results)
    engine = engine_of(pipeline)
    made: list[Output] = []
    try:
        await engine.stream(Job("j", (), SamplingSpec(max_tokens=1), pipeline=SPEC), made.append)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}", pipeline
    return [
        [o.text, o.finish, o.finished, [[m.kind, m.type, m.content[:4].hex()] for m in o.media]] for o in made
    ], pipeline


async def written(results: list[Any], salt: str | None = None) -> tuple[Any, Any]:
    """Returns the outcome of a text job, and the prompt that the pipeline got."""
    pipeline = Pipeline(results)
    pipeline.default_sampling_params_list = pipeline.default_sampling_params_list[:1]
    engine = engine_of(pipeline)
    made: list[Output] = []
    job = Job("j", (1, 2), SamplingSpec(max_tokens=4), cache_salt=salt)
    try:
        await engine.stream(job, made.append)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}", pipeline.asked["prompt"]
    return [[o.text, o.finish, o.finished] for o in made], pipeline.asked["prompt"]


async def aborted_while_drawing() -> Any:
    """Ends the request as vLLM-Omni 0.30 ends an aborted one: finished, without image or error."""

    class Drawing(Pipeline):
        async def generate(self, prompt: Any, **asked: Any) -> AsyncIterator[Any]:
            await engine.abort("j")
            yield image(0)

    pipeline = Drawing([])
    engine = engine_of(pipeline)
    made: list[Output] = []
    await engine.stream(Job("j", (), SamplingSpec(max_tokens=1), pipeline=SPEC), made.append)
    return [[o.finish, o.finished, len(o.media)] for o in made], pipeline.aborted


class Dead(Pipeline):
    """Is a pipeline with a dead stage; the others end slowly."""

    def __init__(self) -> None:
        super().__init__([EngineDeadError("gone")])
        self.may_end = threading.Event()

    async def check_health(self) -> None:
        raise EngineDeadError("gone")

    def shutdown(self) -> None:
        self.may_end.wait(60)


async def dead() -> dict[str, list[str]]:
    """Returns the error for a dead stage, by who notices it first, and whether other stages are awaited."""
    omni_engine.DEAD_SECONDS = 0.01
    job = Job("j", (), SamplingSpec(max_tokens=1), pipeline=SPEC)
    meetings: dict[str, Callable[[OmniEngine], Awaitable[None]]] = {
        "job": lambda engine: engine.stream(job, lambda _: None),
        "health check": lambda engine: engine.check_health(),
    }
    found = {}
    for name, meet in meetings.items():
        pipeline = Dead()
        engine = engine_of(pipeline)
        try:
            await meet(engine)
        except Exception as exc:
            error = type(exc).__name__
        closing = asyncio.create_task(engine.close())
        done, _ = await asyncio.wait({closing}, timeout=30)
        found[name] = [error, "left behind" if done else "waited for"]
        pipeline.may_end.set()
        await closing
    return found


def goodbye() -> bool:
    """Returns whether the client of a dead diffusion stage returns from its shutdown."""
    client = object.__new__(StageDiffusionClient)
    client._zmq_ctx, client._encoder, client._proc_manager = zmq.Context(), msgspec.msgpack.Encoder(), None
    client._request_socket = client._zmq_ctx.socket(zmq.PUSH)
    client._request_socket.bind("inproc://requests")
    client._response_socket = client._zmq_ctx.socket(zmq.PULL)
    thread = threading.Thread(target=client.shutdown, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


async def silence() -> dict[str, bool]:
    """Returns whether outputs_seen grows while a job with this name gives no output."""
    found = {}
    for name in ("client", "canary-1", "warm-up"):
        begun = asyncio.Event()

        class Silent(Pipeline):
            async def generate(self, prompt: Any, **asked: Any) -> AsyncIterator[Any]:
                begun.set()  # noqa: B023
                await asyncio.Event().wait()
                yield None

        engine = engine_of(Silent([]))
        job = Job(name, (), SamplingSpec(max_tokens=1), pipeline=SPEC)
        task = asyncio.create_task(engine.stream(job, lambda _: None))
        await begun.wait()
        found[name] = engine.outputs_seen() != engine.outputs_seen()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return found


def stage() -> dict[str, Any]:
    from vllm.model_executor.models import ModelRegistry
    from vllm_omni.model_executor.models import OmniModelRegistry

    made: Any = stage_class("Qwen3ForCausalLM")
    seen: dict[str, Any] = {}

    class Plain:
        def forward(
            self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any
        ) -> str:
            seen["given"] = [input_ids, positions, intermediate_tensors, inputs_embeds]
            return "hidden"

    plain: Any = made.__mro__[1]
    kept = plain.forward
    plain.forward = Plain.forward
    try:
        answer = made.forward(object.__new__(made), 1, 2, inputs_embeds=3, runtime_additional_information=4)
    finally:
        plain.forward = kept
    return {
        "name": made.__name__,
        "registered": [
            made.__name__ in registry.get_supported_archs() for registry in (ModelRegistry, OmniModelRegistry)
        ],
        "answer": answer,
        **seen,
    }


async def main() -> None:
    plugin.register_omni()
    omni_pipelines.register(omni_pipelines.Pipeline("dynamo_text", "Qwen3ForCausalLM"))
    omni_pipelines.register(omni_pipelines.Pipeline("dynamo_rewrite", "Qwen3ForCausalLM", "X"))
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    _, pipeline = await outcome(CASES["picture"])
    text_params, picture_params = pipeline.asked["sampling_params_list"]
    with wave.open(io.BytesIO(sound_file())) as file:
        shape = [file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()]
    found = {
        "outcomes": {name: (await outcome(results))[0] for name, results in CASES.items()},
        "aborted": await aborted_while_drawing(),
        "written": {
            "whole": (await written([text("a", None), text("b")]))[0],
            "empty": (await written([]))[0],
            "cut": (await written([text("a", None)]))[0],
            "salted": (await written([text("b")], "me"))[1],
        },
        "dead": await dead(),
        "goodbye": goodbye(),
        "silence": await silence(),
        "prompt": pipeline.asked["prompt"],
        "picture": {
            name: getattr(picture_params, name)
            for name in (
                "seed",
                "num_outputs_per_prompt",
                "width",
                "height",
                "num_inference_steps",
                "guidance_scale",
            )
        },
        "text": [text_params.output_kind.name, text_params.seed],
        "sound": shape,
        "length": length(),
        "stereo": stereo(),
        "checked": checked(),
        "eager": eager(),
        "filmed": await filmed(),
        "no picture": no_picture(),
        "stage": stage(),
        "pipelines": {
            name: [stage.execution_type.value for stage in OMNI_PIPELINES[name].stages]
            for name in ("dynamo_text", "dynamo_rewrite")
        },
        "cancellable": adapter.DiffusersAdapterPipeline.supports_request_cancellation,
        "methods": [
            hasattr(AsyncOmni, name) for name in ("generate", "abort", "check_health", "get_tokenizer")
        ],
    }
    print(json.dumps(found))


def sound_file() -> bytes:
    from dynamo_vllm.engine.omni.convert import audio_file

    return audio_file([torch.zeros(240), torch.ones(240)], 16000).content


def length() -> list[Any]:
    """Returns the frames and frame rate that a diffusion stage gets."""
    from dynamo_vllm.engine.omni.convert import stage_params

    spec = PipelineSpec(prompt="a", seed=1, kind="video", frames=5, fps=8, format="mp4")
    (params,) = stage_params(spec, [OmniDiffusionSamplingParams()])
    return [params.num_frames, params.fps]


def stereo() -> list[int]:
    """Has a silent left channel and a loud right one."""
    from dynamo_vllm.engine.omni.convert import audio_file

    samples = torch.stack([torch.zeros(100), torch.ones(100)]).unsqueeze(0)
    with wave.open(io.BytesIO(audio_file(samples, 8000).content)) as file:
        first = file.readframes(1)
        return [
            file.getnchannels(),
            file.getnframes(),
            *(int.from_bytes(first[at : at + 2], "little") for at in (0, 2)),
        ]


def checked() -> dict[str, Any]:
    """Returns what `check --omni` prints for a diffusion model with a flag that the user gave."""
    from dynamo_vllm.cli import check

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model_index.json").write_text(json.dumps({"_class_name": "StableDiffusionPipeline"}))
        found = check.look(check.CheckOptions(), ["--omni", "--model", folder, "--dtype", "bfloat16"], {})
    return {
        "problems": list(found.problems),
        "defaults": [default.argument for default in found.engine_defaults or ()],
        "events": found.facts["kv events"],
    }


def eager() -> list[dict[str, Any]]:
    """Returns what `--enforce-eager` becomes for a diffusers model, alone and with a text stage before it."""
    index = {"_class_name": "StableDiffusionPipeline"}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model_index.json").write_text(json.dumps(index))
        settings = EngineSettings(model=folder, omni=True, argv=("--enforce-eager",))
        alone = omni_pipelines.choose(folder)
        for pipeline in (alone, replace(alone, architecture="Qwen3ForCausalLM")):
            made = omni_arguments.arguments(settings, pipeline, folder)
            found.append({name: value for name, value in made.items() if "eager" in name})
    return found


def no_picture() -> str:
    """Treats a video pipeline as one for images."""
    try:
        media_of(OmniRequestOutput.from_diffusion("j", images=[[RED, RED]]), SPEC)
    except EngineRequestFailed as exc:
        return str(exc)
    return ""


async def filmed() -> dict[str, Any]:
    """Returns frames, rate and audio of the files made from the videos that pipelines give."""
    import av
    import numpy as np

    film = [Image.new("RGB", (16, 18), (shade, 0, 0)) for shade in (0, 100, 200)]
    arrays = np.stack([np.asarray(frame) for frame in film])
    floats = torch.from_numpy(arrays).permute(3, 0, 1, 2).float() / 255
    given = {
        "pictures": [film],
        "bare pictures": film,
        "array": [arrays[None]],
        "tensor": [floats[None]],
        "below zero": [floats[None] * 2 - 1],
        "odd": [[frame.resize((17, 19)) for frame in film]],
    }
    found: dict[str, Any] = {}
    spec = PipelineSpec(prompt="a", seed=1, kind="video", frames=3, fps=8, format="mp4")
    for name, made in given.items():
        more: dict[str, Any] = (
            {"audio": torch.zeros(1, 8000), "audio_sample_rate": 8000} if name == "array" else {}
        )
        result = OmniRequestOutput.from_diffusion("j", images=made, multimodal_output=more)
        (file,) = media_of(result, spec)
        with av.open(io.BytesIO(file.content)) as opened:
            (stream,) = opened.streams.video
            reds = [int(frame.to_ndarray(format="rgb24")[..., 0].mean()) for frame in opened.decode(stream)]
            size, rate, sounds = (
                (stream.width, stream.height),
                float(stream.average_rate),
                len(opened.streams.audio),
            )
        near = all(abs(red - shade) < 12 for red, shade in zip(reds, (0, 100, 200), strict=True))
        found[name] = [file.type, *size, rate, sounds, len(reds), near]
    return found


asyncio.run(main())
