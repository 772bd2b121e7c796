"""Starts the client processes of a load, gives them orders and collects what they report."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dynamo_vllm.bench.http import target
from dynamo_vllm.bench.load import messages, stage_specs
from dynamo_vllm.bench.load.progress_line import ProgressLine

if TYPE_CHECKING:
    from dynamo_vllm.config.options import LoadOptions

T = TypeVar("T")
START_SECONDS = 0.2
"""From the order to go to the start itself, so that every client process has read it."""
_STOP_SECONDS = 10.0


class Crew:
    """The client processes."""

    def __init__(self, interrupted: asyncio.Event) -> None:
        self._interrupted = interrupted
        self._members: list[asyncio.subprocess.Process] = []
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self._seen: dict[int, messages.StageProgress] = {}

    @classmethod
    async def start(cls, where: target.Target, options: LoadOptions, interrupted: asyncio.Event) -> Crew:
        crew, count = cls(interrupted), stage_specs.client_processes(options)
        try:
            for part in range(count):
                member = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "dynamo_vllm.bench.load.generator"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for us
                )
                crew._members.append(member)
                crew._send(member, messages.Begin(where, options.timeout, part, count))
        except BaseException:
            await crew.end()
            raise
        return crew

    async def prepare(self, stage: messages.StageSpec) -> list[str]:
        """Everybody ready; the errors of the warm-up."""
        ready = await self._tell_all(messages.Prepare(stage), messages.Ready, ProgressLine(None))
        return [error for part in ready for error in part.failed_warmups]

    async def go(self, line: ProgressLine) -> tuple[float, list[messages.Done]]:
        """The moment of the start, and what each came back with."""
        at = time.monotonic() + START_SECONDS
        return at, await self._tell_all(messages.Go(at), messages.Done, line)

    async def end(self) -> None:
        """They end when nobody speaks to them any more."""
        for member in self._members:
            if member.stdin is not None:
                member.stdin.close()
        for member in self._members:
            try:
                await asyncio.wait_for(member.wait(), _STOP_SECONDS)
            except TimeoutError:
                member.kill()
                await member.wait()

    async def _tell_all(self, order: messages.Order, kind: type[T], line: ProgressLine) -> list[T]:
        """Give an order and wait for what it brings; an interrupt on the way stops the stage."""
        self._seen.clear()
        stopper = asyncio.create_task(self._stop_when_interrupted())
        for member in self._members:
            self._send(member, order)
        try:
            return await asyncio.gather(
                *(self._await(number, kind, line) for number in range(len(self._members)))
            )
        finally:
            stopper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await stopper

    async def _stop_when_interrupted(self) -> None:
        await self._interrupted.wait()
        for member in self._members:
            self._send(member, messages.Stop())

    async def _await(self, number: int, kind: type[T], line: ProgressLine) -> T:
        member = self._members[number]
        assert member.stdout is not None
        while (said := await messages.receive(member.stdout, self._decoder)) is not None:
            if isinstance(said, kind):
                return said
            if isinstance(said, messages.StageProgress):
                self._seen[number] = said
                line.show(self._seen.values())
        raise target.Unmeasurable(f"a client process ended with exit code {await member.wait()}")

    def _send(self, member: asyncio.subprocess.Process, order: messages.Order) -> None:
        assert member.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, which is noticed when it is awaited
            member.stdin.write(messages.pack(order))
