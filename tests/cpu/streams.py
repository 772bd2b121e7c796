"""Streams from the tiny model in a loop, while a test changes its workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.stack import Stack, Worker
from harness.waiting import until


def prompt(number: int, length: int) -> list[int]:
    return [10 + (number * 97 + i * 13) % 850 for i in range(length)]


LONG = 1000
"""Tokens of an answer that is still on its way when somebody has found out who gives it."""


@dataclass
class Load:
    """Streams until it is stopped; keeps every text and every failure."""

    made: Stack
    clients: int = 4
    models: tuple[str, ...] = ("tiny",)
    max_tokens: int = 120
    texts: list[tuple[int, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self._run, args=(n,)) for n in range(self.clients)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        while not self.stopping.is_set():
            try:
                self.texts.append(
                    (number, stream_text(self.made, number, self.model(number), self.max_tokens))
                )
            except Exception as exc:
                self.failures.append(f"{self.model(number)}: {exc!r}")

    def model(self, number: int) -> str:
        """Returns the model of a client; each has its own."""
        return self.models[number % len(self.models)]

    def settled(self, more: int = 4) -> None:
        """Waits until this many further requests have ended."""
        wanted = len(self.texts) + len(self.failures) + more
        until("requests to end", lambda: len(self.texts) + len(self.failures) >= wanted, 60)


def stream(made: Stack, number: int, max_tokens: int = 120, model: str = "tiny") -> Any:
    return made.openai.completions.create(
        model=model,
        prompt=prompt(number, 40),
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )


def stream_text(made: Stack, number: int, model: str = "tiny", max_tokens: int = 120) -> str:
    return streamed(stream(made, number, max_tokens, model))[0]


def streamed(chunks: Iterable[Any]) -> tuple[str, Any]:
    """Returns text and usage."""
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def busy_worker(workers: Sequence[Worker]) -> Worker:
    in_flight = "dynamo_component_requests_in_flight"
    busy = until("a busy worker", lambda: next((w for w in workers if w.metric(in_flight) > 0), None))
    assert busy is not None
    return busy


def kill_in_mid_stream(start: Callable[[], Iterable[Any]], workers: Sequence[Worker]) -> tuple[Worker, Any]:
    """Kills the worker of a stream, which must go on with the same text; returns it, and the usage."""
    expected, _ = streamed(start())
    chunks = iter(start())
    begun = [next(chunks) for _ in range(20)]
    killed = busy_worker(workers)
    os.killpg(killed.pid, signal.SIGKILL)
    text, usage = streamed([*begun, *chunks])
    assert text == expected
    return killed, usage
