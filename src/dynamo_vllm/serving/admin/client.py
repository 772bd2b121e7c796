"""Calls admin verbs on workers, through the one endpoint that every worker of a namespace serves."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self

from dynamo_vllm.config import planes
from dynamo_vllm.errors import DynamoVllmError, StartError
from dynamo_vllm.serving.admin.endpoint import ENDPOINT
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime, when_not_busy

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dynamo.runtime import Client, Endpoint

    from dynamo_vllm.config.options import FindOptions
    from dynamo_vllm.serving.plane.runtime import Runtime

FIND_SECONDS = {"file": (1.0, 0.0)}
ELSEWHERE = (5.0, 0.3)
"""How long discovery may take to show the first worker, and the others after it; files are read at once."""
STATUS_SECONDS = 5.0
SECONDS = {
    "status": STATUS_SECONDS,
    "list_loras": STATUS_SECONDS,
    "load_lora": 1800.0,
    "unload_lora": 600.0,
    "sleep": 600.0,
    "wake_up": 600.0,
    "pause": 600.0,
    "resume": 60.0,
    "clear_kv_blocks": 60.0,
    "reset_caches": 60.0,
    "prove_tiers": 60.0,
    "start_profile": 60.0,
    "stop_profile": 600.0,
}
"""How long each verb may take: fetching an adapter, draining, reading weights back."""
OTHER_SECONDS = 60.0


class NoWorkers(DynamoVllmError):
    """There are no workers; the message says where we looked."""


class Workers:
    """The workers of a namespace, while the context is open."""

    def __init__(
        self,
        options: FindOptions,
        *,
        may_be_none: bool = False,
        endpoint: Callable[[str], Endpoint] | None = None,
    ) -> None:
        """`endpoint` is that of a runtime that this process has already; there can be only one."""
        self._options = options
        self._endpoint = endpoint
        self._may_be_none = may_be_none
        self._drt: Runtime | None = None
        self._client: Client | None = None

    async def __aenter__(self) -> Self:
        """Raise NoWorkers if discovery shows none, unless there `may_be_none`."""
        from dynamo_vllm.serving.plane import runtime

        try:
            planes.refuse_unreachable(planes.servers(self._options), 0)
            where = f"{self._options.namespace}.{ENDPOINT}"
            with of_runtime():
                endpoint = self._endpoint
                if endpoint is None:
                    self._drt = runtime.caller(self._options, where)
                    endpoint = self._drt.endpoint
                self._client = await when_not_busy(endpoint(where).client)
        except StartError as exc:
            raise NoWorkers(str(exc)) from None
        except RuntimeFailed as exc:
            raise NoWorkers(f"{place(self._options)} cannot be reached: {exc}") from None
        if not self._may_be_none and not await self.seen():
            raise NoWorkers(no_workers_message(self._options))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._drt is not None:
            self._drt.shutdown()

    async def seen(self) -> bool:
        """Return whether discovery shows a worker, now or in a moment."""
        wait, settle = FIND_SECONDS.get(self._options.discovery_backend, ELSEWHERE)
        deadline = time.monotonic() + wait
        while not self.found:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.02)  # the runtime waits for one instance only, and forever
        await asyncio.sleep(settle)
        return True

    @property
    def found(self) -> list[int]:
        """Return the instances that discovery shows now, always in the same order."""
        return [] if self._client is None else sorted(i.instance_id for i in self._client.instances())

    async def ask(
        self,
        instance: int,
        verb: str,
        body: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """Return the worker's reply. Errors are replies too, also that there is none."""
        if self._client is None:
            raise RuntimeError("ask() needs an open context")
        limit = SECONDS.get(verb, OTHER_SECONDS) if seconds is None else seconds
        request = {"verb": verb, "body": dict(body or {})}
        if self._options.admin_token is not None:
            request["token"] = self._options.admin_token
        try:
            async with asyncio.timeout(limit):
                with of_runtime():
                    stream = await self._client.direct(request, instance, annotated=False)
                    replies = [reply async for reply in stream]
        except TimeoutError:
            return failure(
                "no_answer", f"no answer within {limit:g} s; the worker may still be running it", 504
            )
        except RuntimeFailed as exc:
            return _broken(str(exc))
        if not replies or not isinstance(replies[-1], dict):
            return failure("no_answer", "the worker ended before it answered", 502)
        return replies[-1]

    async def ask_all(self, verb: str, seconds: float | None = None) -> dict[int, dict[str, object]]:
        """Call a verb without a body on all workers at the same time and return their replies."""
        found = self.found
        replies = await asyncio.gather(*(self.ask(instance, verb, None, seconds) for instance in found))
        return dict(zip(found, replies, strict=True))


def failure(kind: str, message: str, code: int) -> dict[str, object]:
    """Build a reply in the form of a worker's own errors."""
    return {"status": "error", "error": kind, "message": message, "code": code}


def _broken(text: str) -> dict[str, object]:
    """Runtime 1.6.1 starts every message about a connection with this word."""
    if not text.startswith("Unavailable"):
        return failure("failed", text, 500)
    if "Stream ended" in text or "disconnected" in text:
        return failure("no_answer", "the worker ended before it answered", 502)
    return failure("unreachable", f"cannot be reached: {text}", 503)


def place(options: FindOptions) -> str:
    """Describe where the command looks for workers."""
    folder = options.discovery_folder
    return f"discovery ({options.discovery_backend})" if folder is None else f"discovery at {folder}"


def no_workers_message(options: FindOptions) -> str:
    fix = "give --namespace" if options.discovery_folder is None else "give --file-kv or --run-dir"
    return f"no worker of namespace {options.namespace} is in {place(options)}; start one, or {fix}"
