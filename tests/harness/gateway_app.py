"""A small process with routes of the gateway: `python -m harness.gateway_app JSON`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from dynamo_vllm.config import runtime_env
from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.gateway import schema
from dynamo_vllm.gateway.apis import tokenize
from dynamo_vllm.gateway.batches.routes import Batches
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.responses.routes import Responses
from dynamo_vllm.gateway.transport import Transport
from dynamo_vllm.serving.calls.directory import Directory
from dynamo_vllm.serving.plane import runtime
from dynamo_vllm.serving.tokens.client import TokenWorkers
from harness.open_gate import OpenGate


def app(settings: dict[str, Any]) -> Starlette:
    """`settings` has the arguments of each part by its name."""
    folder = Path(settings["folder"])
    frontend = httpx.AsyncClient(base_url=settings["frontend"], transport=Transport())
    database = Database(settings.get("database") or f"sqlite:///{folder / 'gateway.db'}", schema.ALL)
    responses = Responses(database, frontend, OpenGate(), **settings.get("responses", {}))
    batches = Batches(database, frontend, folder, OpenGate(), **settings.get("batches", {}))
    options = FindOptions(file_kv=settings.get("discovery"))
    directory = Directory(options.namespace, lambda where: runtime.caller(options, where).endpoint(where))

    @contextlib.asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            if options.file_kv is not None:
                runtime_env.export_caller(options, os.environ)
                await stack.enter_async_context(directory)
            for part in (responses, batches):
                part.start()
                stack.push_async_callback(part.close)
            yield

    routes = [*responses.routes(), *batches.routes(), *tokenize.routes(TokenWorkers(directory))]
    return Starlette(routes=routes, lifespan=life)


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    uvicorn.run(app(given), host="127.0.0.1", port=given["port"], log_level="warning")
