"""Starts the client processes of a load, sends them orders and collects their reports."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dynamo_vllm.bench.http import target
from dynamo_vllm.bench.load import messages, stage_specs
from dynamo_vllm.bench.load.progress_line import Progress, ProgressLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.config.options import LoadOptions

T = TypeVar("T")
START_SECONDS = 0.2
"""The time between the order to start and the start, so that every client process has read the order."""
_STOP_SECONDS = 10.0


class ClientProcesses:
    """The client processes of one run."""

    def __init__(self, interrupted: asyncio.Event) -> None:
        self._interrupted = interrupted
        self._members: list[asyncio.subprocess.Process] = []
        self._decoder = msgspec.msgpack.Decoder(messages.Report)
        self._progress: dict[int, messages.StageProgress] = {}

    @classmethod
    async def start(
        cls, targets: Sequence[target.Target], options: LoadOptions, interrupted: asyncio.Event
    ) -> ClientProcesses:
        """Start the processes; they are spread over the servers."""
        clients, count = cls(interrupted), stage_specs.client_count(options)
        try:
            for part in range(count):
                member = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "dynamo_vllm.bench.load.generator"),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C must reach only this process
                )
                clients._members.append(member)
                clients._send(
                    member, messages.Begin(targets[part % len(targets)], options.timeout, part, count)
                )
        except BaseException:
            await clients.end()
            raise
        return clients

    async def prepare(self, stage: messages.StageSpec) -> list[str]:
        """Wait until all processes are ready for a stage; return the errors of the warm-up."""
        ready = await self._order_all(messages.Prepare(stage), messages.Ready, ProgressLine(None))
        return [error for part in ready for error in part.failed_warmups]

    async def go(self, line: Progress) -> tuple[float, list[messages.Done]]:
        """Run the prepared stage; return its start time and the report of each process."""
        at = time.monotonic() + START_SECONDS
        done = await self._order_all(messages.Go(at), messages.Done, line)
        line.complete(self._progress.values())
        return at, done

    async def end(self) -> None:
        """Close their standard input, which ends them, and kill those that do not end in time."""
        for member in self._members:
            if member.stdin is not None:
                member.stdin.close()
        for member in self._members:
            try:
                await asyncio.wait_for(member.wait(), _STOP_SECONDS)
            except TimeoutError:
                member.kill()
                await member.wait()

    async def _order_all(self, order: messages.Order, kind: type[T], line: Progress) -> list[T]:
        """Send an order to all and wait for their replies; an interrupt meanwhile stops the stage."""
        self._progress.clear()
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

    async def _await(self, number: int, kind: type[T], line: Progress) -> T:
        member = self._members[number]
        assert member.stdout is not None
        while (report := await messages.receive(member.stdout, self._decoder)) is not None:
            if isinstance(report, kind):
                return report
            if isinstance(report, messages.StageProgress):
                self._progress[number] = report
                line.answered(report.first_tokens)
                line.show(self._progress.values())
        raise target.BenchError(f"a client process ended with exit code {await member.wait()}")

    def _send(self, member: asyncio.subprocess.Process, order: messages.Order) -> None:
        assert member.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # it has ended; _await reports that
            member.stdin.write(messages.pack(order))
