"""Runs native media decoders in a child process, so that a crash cannot end the worker."""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import select
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm import errors
from dynamo_vllm.errors import MediaRefused

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.cancellation import Deadline
    from dynamo_vllm.media.decode.sniff import MediaFormat

logger = logging.getLogger(__name__)

_POLL_MS = 100
_LIMITS = (
    "max_pixels",
    "max_video_pixels",
    "max_frames",
    "max_seconds",
    "max_speech_bytes",
    "timeout_seconds",
)
# With this process's module paths, without additions by the environment or .pth files.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from dynamo_vllm.media.decode.decode_child import main; main()"
)


@contextlib.contextmanager
def decoder(data: bytes, format: MediaFormat, limits: MediaLimits, watch: Deadline) -> Iterator[Decoder]:
    """Start a process that decodes `data`; it ends with the block."""
    with _memory_file("encoded") as source, _memory_file("decoded") as target:
        with open(source, "wb", closefd=False) as file:
            file.write(data)
        order = {
            "kind": format.kind,
            "format": format.name,
            "source": source,
            "bytes": len(data),
            "target": target,
            "limits": {name: getattr(limits, name) for name in _LIMITS},
        }
        with _child(order) as process:
            yield Decoder(process, target, format, watch)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Lines of JSON to and from the process, and the memory it writes to."""

    process: subprocess.Popen[bytes]
    target: int
    format: MediaFormat
    watch: Deadline

    def send(self, what: list[int]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next read reports how it ended
            self.process.stdin.write(json.dumps(what).encode() + b"\n")

    def receive(self) -> dict[str, Any]:
        """Return the next line, unless the process ends first or the time is over."""
        assert self.process.stdout is not None
        ready = select.poll()  # unlike select.select, for any number of open files
        ready.register(self.process.stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            self.watch.check()
            if not ready.poll(_POLL_MS):
                continue
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                code, name = self.process.wait(), self.format.name
                logger.warning("media: the decoder of a %s file ended with code %d", name, code)
                raise MediaRefused(f"the {name} is broken: its decoder crashed")
            line += data
        answer: dict[str, Any] = json.loads(line)
        if "refused" in answer:
            raise getattr(errors, answer["refused"])(answer["why"])
        return answer

    def decoded(self, size: int) -> mmap.mmap:
        """Return what it wrote, in private pages: a write here, against the rule, affects nobody else."""
        return mmap.mmap(self.target, size, access=mmap.ACCESS_COPY)


@contextlib.contextmanager
def _memory_file(name: str) -> Iterator[int]:
    handle = os.memfd_create(f"media-{name}")
    try:
        yield handle
    finally:
        os.close(handle)


@contextlib.contextmanager
def _child(order: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", _START, json.dumps(order), json.dumps(sys.path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(order["source"], order["target"]),
        bufsize=0,
        cwd="/",
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # it has sent everything, or is not needed any more
