"""Workers for pictures, videos and sounds without an engine: a request gets a file that says what it was.

Run as `python -m harness.maker MODEL` with the deployment's environment. Role, registration and the loop are
the real ones; the models are called image, video and audio.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.controlled import HOSTS

KINDS = {"image": "image/png", "video": "video/mp4", "audio": "audio/wav"}


@contextmanager
def makers(env: Mapping[str, str], model: Path) -> Iterator[None]:
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.maker", str(model)],
        cwd=Path(__file__).parents[1],
        env={**env, **dict.fromkeys(HOSTS, "127.0.0.1"), "DYN_LOG": "off"},
    )
    with process:
        try:
            yield
        finally:
            process.kill()


async def serve(model: str) -> None:
    from dynamo.runtime import DistributedRuntime

    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    await asyncio.gather(*(serve_kind(runtime, model, kind) for kind in KINDS))


async def serve_kind(runtime: Any, model: str, kind: str) -> None:
    from dynamo_vllm.codec.pipeline import Bounds
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.engine.fake.engine import FakeEngine
    from dynamo_vllm.engine.fake.spec import parse_spec
    from dynamo_vllm.job import EngineFacts, PipelineLimits
    from dynamo_vllm.roles.omni import MediaPipeline
    from dynamo_vllm.serving.plane.registration import Registration
    from dynamo_vllm.serving.request.cancel import InFlight
    from dynamo_vllm.serving.request.service import Service

    class Maker(FakeEngine):
        async def stream(self, job: Any, sink: Any) -> None:
            sink(made(job.pipeline))

    facts = EngineFacts(
        context_length=1,
        vocab_size=1,
        block_size=16,
        total_kv_blocks=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        pipeline=PipelineLimits(step=8, kind=kind, frames=16),
    )
    bounds = Bounds(max_side=1024, max_steps=50, max_images=4, max_megapixels=20, max_video_megapixels=20)
    role = MediaPipeline(facts, [kind], bounds, len)
    engine = Maker(parse_spec(None), lambda _: None)
    endpoint = runtime.endpoint(f"dynamo.{kind}.generate")
    options = WorkerOptions(model=model, served_model_name=(kind,))
    with tempfile.TemporaryDirectory() as scratch:
        registration = Registration(endpoint, options, role.card, facts, scratch)
        await registration.publish()
        service = Service(role, engine, InFlight(engine), lambda _: None)
        await registration.serve(service.generate, role.health_check())


def made(spec: Any) -> Any:
    """One file, whose content is the spec as JSON."""
    from dynamo_vllm.job import MediaFile, Output

    content = json.dumps(dataclasses.asdict(spec)).encode()
    return Output((), finish="stop", finished=True, media=[MediaFile(spec.kind, KINDS[spec.kind], content)])


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
