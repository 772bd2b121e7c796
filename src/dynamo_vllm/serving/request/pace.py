"""Lets the tokens of a stream travel together while a worker has many streams.

A message to the frontend costs the same with one token or with five: about 60 µs of CPU in all processes,
more than an engine spends on a token of a small model. A worker with 256 streams and steps of 8 ms would send
30 000 messages a second. So it keeps a limit for all its streams together, and each of them waits its turn:
with n streams, one sends again n / limit seconds after its last message. A first token never waits, nor does
the last; with few streams nothing waits.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.engine.base import Sink

MESSAGES_PER_SECOND = 10_000
SHORTEST_SECONDS = 0.002
"""A shorter wait saves nothing: no step of an engine is shorter."""
LONGEST_SECONDS = 0.05
"""20 messages a second and stream look smooth to a reader."""


class Pace:
    """Counts the streams of one worker that have begun, and says how long each of them waits."""

    def __init__(
        self, messages_per_second: int = MESSAGES_PER_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.clock = clock
        self.seconds = 0.0
        """The time between two messages of a stream; 0 if none has to wait."""
        self._per_second = messages_per_second
        self._streams = 0
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def count(self, more: int) -> None:
        self._streams += more
        wait = self._streams / self._per_second if self._per_second else 0.0
        if wait >= SHORTEST_SECONDS:
            self.seconds = min(wait, LONGEST_SECONDS)
        elif not self._waiting:  # else not yet: what waits must not be overtaken
            self.seconds = 0.0

    def call_later(self, send: Callable[[], None]) -> None:
        """Call it when the next message is due, in case the engine makes no step until then."""
        self._waiting.append(send)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.seconds, self._call)

    def _call(self) -> None:
        waiting, self._waiting, self._timer = self._waiting, [], None
        for send in waiting:
            send()
        self.count(0)


UNPACED = Pace(0)
"""For streams whose outputs have more than tokens: each goes into a message of its own."""


class Gathering:
    """The tokens of one stream that wait for its next message."""

    __slots__ = ("_due", "_failure", "_out", "_tokens", "pace")

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._out: Sink | None = None
        self._tokens: list[int] = []
        self._due = 0.0
        self._failure: Exception | None = None

    def begin(self, out: Sink) -> None:
        """Count the stream; `out` sends what has waited for too long."""
        self._out = out
        self.pace.count(1)
        self._due = self.pace.clock() + self.pace.seconds

    def end(self) -> None:
        """Forget what waits: the stream's last output took everything along, or nobody wants it."""
        self._tokens.clear()
        if self._out is not None:
            self._out = None
            self.pace.count(-1)

    def keeps(self, output: Output) -> bool:
        """Keep the tokens if the next message is not due yet; otherwise add those that wait."""
        if self._failure is not None:
            raise self._failure
        now = self.pace.clock()
        if now < self._due and output.finish is None:
            if not self._tokens:
                self.pace.call_later(self._send)
            self._tokens += output.token_ids
            return True
        self._due = now + self.pace.seconds
        if self._tokens:
            output.token_ids = [*self._tokens, *output.token_ids]
            self._tokens.clear()
        return False

    def _send(self) -> None:
        """Send what waits; an error ends the job with its next token."""
        if not self._tokens or self._out is None:
            return
        self._due = 0.0
        try:
            self._out(Output([]))
        except Exception as exc:
            self._failure = exc
