"""A worker for speech without a model: `python -m harness.transcriber NAME FILE`.

It says what it got as text. `FILE` gets a line for each request that has begun or ended. A request whose
prompt is "wait" is answered in part and then waits until it is stopped; "refuse" does so.
"""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

DURATION = 2.5
SEGMENTS = [
    {"id": 0, "start": 0.0, "end": 1.5, "text": " one"},
    {"id": 1, "start": 1.5, "end": DURATION, "text": " two"},
]
WORDS = [{"word": "one", "start": 0.0, "end": 1.5}, {"word": "two", "start": 1.5, "end": DURATION}]
USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}


async def serve(name: str, log: Path) -> None:
    from dynamo.llm.exceptions import InvalidArgument
    from dynamo.runtime import DistributedRuntime

    namespace = os.environ["DYN_NAMESPACE"]
    drt = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    address = f"{namespace}.transcription.generate"
    own, shared = drt.endpoint(address), drt.endpoint(f"{namespace}.tokens.convert")

    def note(line: str) -> None:
        with log.open("a") as file:
            file.write(line + "\n")

    async def describe(request: object, context: object = None) -> AsyncIterator[dict[str, Any]]:
        card = {"models": [name], "kind": "transcription", "apis": ["transcriptions"], "address": address}
        more = {"instance": own.connection_id(), "max_model_len": 448, "converts": False}
        yield {"status": 200, "body": {**card, **more}}

    async def generate(request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        prompt = request.get("prompt")
        note(f"begun {prompt} {context.metadata.get('gateway')}")
        if prompt == "refuse":
            raise InvalidArgument("file: this is no sound")
        size = len(base64.b64decode(request["file"]))
        fields = {k: v for k, v in request.items() if k != "file"}
        yield {"text": f"{size} bytes"}
        while prompt == "wait":
            if context.is_stopped() or context.is_killed():
                note("stopped")
                return
            await asyncio.sleep(0.02)
        yield {"text": " one"}
        yield {"text": " two"}
        words = WORDS if "word" in request["timestamp_granularities"] else None
        ending = {"done": True, "language": fields.get("language", "en"), "duration": DURATION}
        yield {**ending, "segments": SEGMENTS, "words": words, "usage": USAGE, "fields": fields}

    note("started")
    await asyncio.gather(own.serve_endpoint(generate), shared.serve_endpoint(describe))


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
