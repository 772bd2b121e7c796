"""Runs one load test at a time, as the command `bench load` in a process that ends with the console."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.observe.frontend_client import harmless

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

# In the new process, before it has threads: the kernel ends it when this one does.
_RUN = (
    "import sys; from dynamo_vllm import forking; from dynamo_vllm.cli.main import main; "
    "forking.end_with_parent(int(sys.argv[1]), 15); main(['bench', 'load', *sys.argv[2:]])"
)
MOST_ROWS = 600
REPORT_BYTES = 16 << 20
STOP_SECONDS = 10.0
MOST_NAME_CHARACTERS = 1000
_CONCURRENCY = re.compile(r"[0-9]{1,5}(,[0-9]{1,5}){0,9}")


class BenchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What a page may ask for: a small part of the command's options."""

    model: str
    concurrency: str | int = "8"
    requests: int | None = None
    seconds: float | None = None
    input_tokens: int = 128
    output_tokens: int = 64
    prompts: Literal["random", "prefix", "turns"] = "random"

    def check(self) -> None:
        """Raise for what would run for hours, or cannot run."""
        if (self.requests is None) == (self.seconds is None):
            raise ConsoleError(400, "give either requests or seconds")
        if not _CONCURRENCY.fullmatch(str(self.concurrency)):
            raise ConsoleError(400, f"concurrency {self.concurrency!r} is no number", "write 8, or 1,8,32")
        limits = {"requests": 100_000, "seconds": 3600, "input_tokens": 1_000_000, "output_tokens": 100_000}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is not None and not 0 < value <= most:
                raise ConsoleError(400, f"{name} must be from 1 to {most}")
        if not self.model or self.model.startswith("-"):
            raise ConsoleError(400, "give the name of a model")
        if len(self.model) > MOST_NAME_CHARACTERS or not self.model.isprintable():
            raise ConsoleError(
                400, f"the name of a model has at most {MOST_NAME_CHARACTERS} characters that can be printed"
            )

    def words(self, url: str) -> list[str]:
        words = [url, f"--model={self.model}", f"--concurrency={self.concurrency}"]
        names = ("requests", "seconds", "input_tokens", "output_tokens", "prompts")
        given = {name: getattr(self, name) for name in names}
        more = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
        return [*words, "--json=-", "--progress=json", *more]


class Bench:
    """The last load test, whether it runs or not."""

    def __init__(
        self,
        url: str,
        publish: Callable[[str, object], None],
        environment: Mapping[str, str],
        command: Sequence[str] | None = None,
    ) -> None:
        self._url = url
        self._publish = publish
        self._environment = environment
        self._command = command or (sys.executable, "-P", "-c", _RUN, str(os.getpid()))
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._rows: deque[dict[str, Any]] = deque(maxlen=MOST_ROWS)
        self._id: str | None = None
        self._state = "idle"
        self._is_stopping = False
        self._before: dict[str, Any] | None = None
        self._asked: dict[str, Any] = {}
        self._began = self._ended = 0.0
        self._stages: list[Any] = []
        self._error: str | None = None

    def state(self) -> dict[str, Any]:
        until = time.monotonic() if self._state == "running" else self._ended
        return {
            "id": self._id,
            "state": self._state,
            "asked": self._asked,
            "seconds": round(until - self._began, 1),
            "progress": list(self._rows),
            "stages": self._stages,
            "error": self._error,
        }

    async def start(self, asked: BenchRequest) -> dict[str, Any]:
        if self._state == "running":
            raise ConsoleError(409, "a load test runs already", "stop it, or wait for its end")
        asked.check()
        self._state, self._id = "running", uuid.uuid4().hex[:12]
        self._asked = {name: value for name, value in msgspec.to_builtins(asked).items() if value is not None}
        self._rows.clear()
        self._before = None
        self._stages, self._error, self._is_stopping = [], None, False
        self._began = time.monotonic()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                *asked.words(self._url),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=REPORT_BYTES,
                env=dict(self._environment),
                start_new_session=True,
            )
        except OSError as exc:
            self._finish("failed", f"it could not be started: {exc.strerror}")
            raise ConsoleError(500, f"the load test could not be started: {exc.strerror}") from None
        self._task = asyncio.create_task(self._follow(self._process))
        self._tell()
        return {"id": self._id}

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None and process.stderr is not None
        reading = asyncio.create_task(process.stdout.read(-1))
        said: deque[str] = deque(maxlen=20)
        try:
            while line := await _line(process.stderr):
                self._note(line, said)
            report, code = await reading, await process.wait()
        finally:
            reading.cancel()
            _kill(process)
        with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
            self._stages = msgspec.json.decode(report)["stages"]
        if self._is_stopping or code in (130, -signal.SIGINT, -signal.SIGTERM):
            self._finish("stopped", None)
        elif code == 0 and self._stages:
            self._finish("done", None)
        else:
            errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
            self._finish("failed", errors[-1] if errors else "\n".join(said) or f"it ended with code {code}")

    def _note(self, line: str, said: deque[str]) -> None:
        found = figures(line)
        if found is None:
            said.append(harmless(line.strip()))
            return
        self._rows.append({"at": round(time.monotonic() - self._began, 1), **row(found, self._before)})
        self._before = found
        self._tell()

    def _finish(self, state: str, error: str | None) -> None:
        self._state, self._error, self._ended = state, error, time.monotonic()
        self._process = None
        self._tell()

    def _tell(self) -> None:
        self._publish("bench", self.state())

    async def stop(self) -> dict[str, Any]:
        """Ask the load test to end; it reports what is complete."""
        process, task = self._process, self._task
        if process is None or task is None or self._state != "running":
            raise ConsoleError(409, "no load test runs")
        self._is_stopping = True
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait({task}, timeout=STOP_SECONDS)
        if not task.done():
            _kill(process)
            await asyncio.wait({task}, timeout=STOP_SECONDS)
        return self.state()

    async def close(self) -> None:
        if self._process is not None:
            _kill(self._process)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=1.0)


async def _line(stream: asyncio.StreamReader) -> str:
    """Return a line with its end; nothing at the end of the stream. One that is too long is cut away."""
    try:
        return (
            (await stream.readline()).decode(errors="replace").rstrip() + "\n" if not stream.at_eof() else ""
        )
    except ValueError:
        return "…\n"


def figures(line: str) -> dict[str, Any] | None:
    """Return what a line of progress says; None for another line."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and {"stage", "seconds", "ok"} <= found.keys() else None


def row(now: dict[str, Any], before: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row of progress, with the rate since the row before of the same stage."""
    last = before if before is not None and before.get("number") == now.get("number") else {}
    passed = now["seconds"] - last.get("seconds", 0.0)
    return {
        "stage": harmless(str(now["stage"])),
        "done": now["ok"],
        "failed": now.get("failed", 0),
        "requests_per_second": round((now["ok"] - last.get("ok", 0)) / passed, 2) if passed > 0 else 0.0,
        "output_tokens_per_second": now.get("tokens_per_second"),
        "ttft_ms": (now.get("ttft_ms") or {}).get("p50"),
    }


def _kill(process: asyncio.subprocess.Process) -> None:
    """Also the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
