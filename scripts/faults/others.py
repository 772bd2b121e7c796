"""Runs well-behaved clients during a scenario, and checks that their answers are right and steady."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Collection
from typing import Any

import httpx

from harness.waiting import until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
Request = tuple[str, dict[str, Any]]
"""Path and body."""


def of_fake_engine(clients: int = 2, model: str = "tiny") -> list[Request]:
    """Its answer depends on the prompt's first token alone."""
    return [
        (COMPLETIONS, {"model": model, "prompt": [20 + n, 5, 6], "max_tokens": 20}) for n in range(clients)
    ]


def of_demo_chat(clients: int = 2) -> list[Request]:
    return [
        (
            CHAT,
            {
                "model": "demo-chat",
                "messages": [{"role": "user", "content": f"What is {17 + n} + 25?"}],
                "max_tokens": 60,
                "temperature": 0,
            },
        )
        for n in range(clients)
    ]


class Others:
    """Streams answers over and over; each must be the one that it was in a quiet moment."""

    def __init__(self, url: str, requests: list[Request], may_refuse: Collection[int] = ()) -> None:
        self._client = httpx.Client(
            base_url=url, timeout=120, verify=False, limits=httpx.Limits(max_connections=None)
        )
        self._requests = requests
        self._may_refuse = may_refuse
        self._expected: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(n,)) for n in range(len(requests))]
        self.right: Counter[int] = Counter()
        self.refused: Counter[int] = Counter()
        self.failures: list[str] = []
        self.longest_seconds = 0.0
        """Between two pieces of an answer, or before the first."""

    def __enter__(self) -> Others:
        self._expected = [self._stream(request)[1] for request in self._requests]
        assert all(self._expected), f"no answer in a quiet moment: {self._expected}"
        self.longest_seconds = 0.0
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(180)
        self._client.close()

    def _repeat(self, number: int) -> None:
        while not self._stopping.is_set():
            try:
                status, text = self._stream(self._requests[number])
            except httpx.HTTPError as exc:
                self.failures.append(repr(exc))
                continue
            if status in self._may_refuse:
                self.refused[status] += 1
            elif status != 200 or text != self._expected[number]:
                self.failures.append(f"{status} {text!r}, not {self._expected[number]!r}")
            else:
                self.right[number] += 1

    def _stream(self, request: Request) -> tuple[int, str]:
        path, body = request
        pieces: list[str] = []
        last = time.monotonic()
        with self._client.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code != 200:
                return answer.status_code, answer.read().decode(errors="replace")[:300]
            for line in answer.iter_lines():
                now = time.monotonic()
                self.longest_seconds = max(self.longest_seconds, now - last)
                last = now
                if line.startswith("data: {"):
                    pieces += [text_of(choice) for choice in json.loads(line[6:])["choices"]]
                elif line.startswith("event: error"):
                    return 500, "".join(pieces)
        return 200, "".join(pieces)

    def go_on(self, answers: int = 2, seconds: float = 120) -> None:
        """Returns when each of them has got so many further right answers."""
        wanted = {n: self.right[n] + answers for n in range(len(self._requests))}

        def all_have() -> bool:
            self.check()
            return all(self.right[n] >= least for n, least in wanted.items())

        until("right answers for the others", all_have, seconds)

    def check(self) -> None:
        assert not self.failures, f"{len(self.failures)} wrong: {self.failures[0]}"

    @property
    def total(self) -> int:
        return sum(self.right.values())


def text_of(choice: dict[str, Any]) -> str:
    return (choice.get("text") or choice.get("delta", {}).get("content")) or ""
