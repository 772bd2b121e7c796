"""Creates the runtime on the running loop; `config.runtime_env` has set its variables before."""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dynamo.runtime import DistributedRuntime

from dynamo_vllm.config import runtime_env
from dynamo_vllm.errors import StartError
from dynamo_vllm.serving.plane import inotify
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from dynamo.runtime import Endpoint

    from dynamo_vllm.config.options import ReachOptions, RuntimeOptions

logger = logging.getLogger(__name__)
_UNLISTED = "Unable to register service"
"""What the runtime (1.6.1) raises if discovery did not take an endpoint."""


class Runtime:
    """The runtime of a process that serves or calls, with all its endpoints created at the start.

    Over NATS, runtime 1.6.1 creates an endpoint by waiting for one of its threads while it holds the GIL; if
    that thread waits for the GIL, as for any answer to Python, both wait forever.
    """

    def __init__(self, drt: DistributedRuntime, addresses: Iterable[str] = ()) -> None:
        self._drt = drt
        self._endpoints = {address: drt.endpoint(address) for address in addresses}
        self._serving: list[asyncio.Future[None]] = []
        self.unlisted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises StartError once an endpoint could not be put into discovery."""

    def endpoint(self, address: str) -> Endpoint:
        """Return one of the endpoints named at the start."""
        return self._endpoints[address]

    def serve(self, address: str, handler: Any, consequence: str) -> None:
        """Serve an endpoint besides the worker's own until the runtime ends.

        If discovery does not take it, the process must start again: others would never find the endpoint, and
        runtime 1.6.1 serves one only once.
        """
        serving = asyncio.ensure_future(self.endpoint(address).serve_endpoint(handler))
        serving.add_done_callback(functools.partial(self._ended, consequence))
        self._serving.append(serving)

    def _ended(self, consequence: str, serving: asyncio.Future[None]) -> None:
        if serving.cancelled() or (exc := serving.exception()) is None:
            return
        logger.warning("%s: %s", consequence, exc)
        if str(exc).startswith(_UNLISTED) and not self.unlisted.done():
            self.unlisted.set_exception(StartError(f"discovery did not take this worker ({consequence})"))
            self.unlisted.exception()  # whoever would wait for it may have gone

    def refuse_unlisted(self) -> None:
        """Raise StartError if discovery did not take an endpoint."""
        if self.unlisted.done():
            self.unlisted.result()

    def set_health_status(self, ready: bool) -> None:
        self._drt.set_health_status(ready)

    def shutdown(self) -> None:
        self._drt.shutdown()


def create(options: RuntimeOptions, inotify_instances: int) -> DistributedRuntime:
    if options.discovery_backend == "file":
        inotify.refuse_used_up(inotify_instances)
    try:
        with of_runtime():
            drt = DistributedRuntime(
                asyncio.get_running_loop(),
                options.discovery_backend,
                options.request_plane,
                event_plane=options.event_plane,
            )
    except RuntimeFailed as exc:
        planes = f"{options.discovery_backend}, {options.request_plane}, {options.event_plane}"
        raise StartError(f"no connection to the deployment ({planes}): {exc}{_advice(str(exc))}") from None
    return drt


def _advice(reason: str) -> str:
    known = {
        "POD_NAME": ". Kubernetes discovery works inside a pod, with POD_NAME, POD_NAMESPACE and POD_UID",
        "NATS": ". Set NATS_AUTH_USERNAME and NATS_AUTH_PASSWORD, or what the server asks for",
        "lease": ". Set ETCD_AUTH_USERNAME and ETCD_AUTH_PASSWORD, or what etcd asks for",
    }
    return next((advice for word, advice in known.items() if word in reason), "")


def caller(options: ReachOptions, address: str) -> Runtime:
    """For a process that only calls others and publishes nothing, so any event plane works."""
    return Runtime(long_caller(options), [address])


def long_caller(options: ReachOptions, folder: Path | None = None) -> DistributedRuntime:
    """The same for a process that lives long and learns of endpoints on the way. Over NATS it needs several
    of the runtime's threads: see `Runtime`. It reads file discovery in `folder` instead of the real one.
    """
    loop = asyncio.get_running_loop()
    if folder is None:
        return DistributedRuntime(loop, options.discovery_backend, options.request_plane, event_plane="zmq")
    runtime_env.export_reach(replace(options, file_kv=str(folder)))  # which it reads once
    try:
        return long_caller(options)
    finally:
        runtime_env.export_reach(options)


def alone() -> Runtime:
    """For a process outside any deployment: it has a health server and needs no service."""
    return Runtime(DistributedRuntime(asyncio.get_running_loop(), "mem", "tcp", event_plane="zmq"))
