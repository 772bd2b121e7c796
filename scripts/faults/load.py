"""Keeps clients asking while something fails, and counts what became of every request.

Each client streams the same answer over and over; what it must be was asked for in a quiet moment.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from faults.others import COMPLETIONS, Request, text_of
from faults.scenario import Counts
from harness.waiting import until

CLOSED, REFUSED, BROKEN = "connection closed", "connection refused", "error in the stream"
"""How a request can fail without a status."""
PATIENCE_SECONDS = 180


@dataclass
class Answer:
    """What one client got for one request; `failure` is empty where the answer has its end."""

    client: int
    began: float
    text: str = ""
    tokens: int = 0
    failure: str = ""
    longest_pause: float = 0.0

    def differs(self, expected: Answer) -> bool:
        """A broken answer may be shorter, but what came must be right."""
        return not expected.text.startswith(self.text) if self.failure else self.text != expected.text


@dataclass
class Client:
    """One of those who ask: `received` counts the pieces of the answer that is under way, from `url`."""

    request: Request
    expected: list[Answer] = field(default_factory=list)
    """The answers of quiet moments: several, if what answers changes meanwhile."""
    received: int = 0
    url: str = ""

    def right(self, answer: Answer) -> Answer:
        """The expected answer that this one is or begins with; the first one if it is none of them."""
        fitting = (one for one in self.expected if not answer.differs(one))
        return next(fitting, self.expected[0])


def long_answers(clients: int, tokens: int, model: str = "tiny", prompt: int = 33) -> list[Request]:
    """Of the fake engine, or of a tiny model: every client asks something else with so many tokens."""
    return [
        (
            COMPLETIONS,
            {
                "model": model,
                "prompt": [20 + number, *(30 + n % 800 for n in range(prompt - 1))],
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
            },
        )
        for number in range(clients)
    ]


class Load:
    """Clients of one or several frontends, which they use in turn; one that is away is passed over.

    `with Load(url, requests) as load:` then `load.in_full_swing()`, `load.fault()`, the fault itself,
    `load.recovered(…)`; `load.counts()` says what was seen. With `salted` no request finds anything of an
    earlier one in a cache; `pause` is a client's time in seconds between an answer and its next
    request, after the fault.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        requests: Sequence[Request],
        *,
        salted: bool = False,
        pause: float = 0,
        again_seconds: float = 0.1,
    ) -> None:
        """`again_seconds` is how long a client waits after a failure before it asks again."""
        self._pause_seconds = pause
        self._salts = itertools.count() if salted else None
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        self._http = httpx.Client(timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_connections=None))
        self.clients = [Client(request) for request in requests]
        self.answers: list[Answer] = []
        self._again_seconds = again_seconds
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(n,)) for n in range(len(requests))]
        self._failed_at = 0.0
        self._recovered_seconds: float | None = None

    def __enter__(self) -> Self:
        if not all(client.expected for client in self.clients):
            self.learn()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE_SECONDS + 30)
        self._http.close()

    def learn(self) -> None:
        """Asks in a quiet moment; may be called before the block too, for each state with other answers."""
        asked: dict[str, Answer] = {}
        for number, client in enumerate(self.clients):
            key = json.dumps(client.request)
            answer = asked[key] = asked.get(key) or self._ask(number, number)
            assert not answer.failure, f"in a quiet moment: {answer.failure}"
            assert answer.text, "no text in a quiet moment"
            if all(answer.text != known.text for known in client.expected):
                client.expected.append(answer)

    def in_full_swing(self, pieces: int = 2) -> None:
        """Returns when each client has had a right answer and is in the middle of another one."""
        until("a right answer for each client", lambda: self._all_right_since(0.0), 120)
        until("answers under way", lambda: self.all_have(pieces), 120)

    def all_have(self, pieces: int) -> bool:
        """Each client is in the middle of an answer."""
        return all(client.received >= pieces for client in self.clients)

    def fault(self) -> None:
        """Something fails now."""
        self._failed_at = time.monotonic()

    def recovered(self, is_whole: Callable[[], object] = lambda: True, seconds: float = 240) -> None:
        """Waits until all parts are back and each client has a right answer to a later request."""
        until("all parts back", is_whole, seconds, every=0.05)
        until("right answers again", lambda: self._all_right_since(self._failed_at), seconds)
        took = time.monotonic() - self._failed_at
        self._recovered_seconds = max(took, self._recovered_seconds or 0.0)

    def all_answered(self, seconds: float = 120) -> None:
        """Waits until each client has a right answer to a request that it sends from now on."""
        moment = time.monotonic()
        until("right answers from now on", lambda: self._all_right_since(moment), seconds)

    def counts(self) -> Counts:
        """Of all requests since the beginning. Ask after the end of the block."""
        ended = [answer for answer in self.answers if not answer.failure]
        more = [answer.tokens - self._right(answer).tokens for answer in ended]
        return Counts(
            requests=len(self.answers),
            wrong=sum(answer.differs(self._right(answer)) for answer in self.answers),
            failed=Counter(answer.failure for answer in self.answers if answer.failure),
            lost=sum(-n for n in more if n < 0),
            doubled=sum(n for n in more if n > 0),
            longest_pause=max((answer.longest_pause for answer in self.answers), default=0.0),
            recovered_seconds=self._recovered_seconds,
        )

    def failed_after(self, seconds: float) -> int:
        """Requests in vain that began so long after the fault."""
        return sum(bool(a.failure) and a.began > self._failed_at + seconds for a in self.answers)

    def right_answers(self) -> int:
        """How many there are by now."""
        return sum(map(self._is_right, list(self.answers)))

    def _is_right(self, answer: Answer) -> bool:
        return not answer.failure and not answer.differs(self._right(answer))

    def _all_right_since(self, moment: float) -> bool:
        found = [answer for answer in list(self.answers) if answer.began >= moment]
        return len({answer.client for answer in found if self._is_right(answer)}) == len(self.clients)

    def _right(self, answer: Answer) -> Answer:
        return self.clients[answer.client].right(answer)

    def _repeat(self, number: int) -> None:
        turn = number
        while not self._stopping.is_set():
            turn += 1
            answer = self._ask(number, turn)
            self.answers.append(answer)
            if answer.failure:
                self._stopping.wait(self._again_seconds)  # as a client that tries again does
            elif self._failed_at:
                self._stopping.wait(self._pause_seconds)

    def _ask(self, number: int, turn: int) -> Answer:
        client = self.clients[number]
        for url in (self._urls[(turn + n) % len(self._urls)] for n in range(len(self._urls))):
            answer = Answer(number, time.monotonic())
            client.received, client.url = 0, url
            try:
                self._stream(client, url, answer)
            except httpx.ConnectError:
                answer.failure = REFUSED
                continue  # another frontend may be there
            except (httpx.RemoteProtocolError, httpx.ReadError):
                answer.failure = CLOSED  # in order, or by a reset
            except httpx.HTTPError as exc:
                answer.failure = type(exc).__name__
            break
        client.received = 0
        return answer

    def _stream(self, client: Client, url: str, answer: Answer) -> None:
        path, body = client.request
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        if self._salts is not None:
            body["nvext"] = {"cache_salt": f"{time.monotonic_ns()}-{next(self._salts)}"}
        last, done = time.monotonic(), False
        with self._http.stream("POST", url + path, json=body) as response:
            if response.status_code != 200:
                response.read()
                answer.failure = str(response.status_code)
                return
            for line in response.iter_lines():
                now = time.monotonic()
                answer.longest_pause = max(answer.longest_pause, now - last)
                last = now
                if line.startswith("event: error"):
                    answer.failure = BROKEN
                elif line.startswith("data: {"):
                    take(json.loads(line[6:]), client, answer)
                done = done or line == "data: [DONE]"
        if not done and not answer.failure:
            answer.failure = CLOSED


def take(chunk: dict[str, Any], client: Client, answer: Answer) -> None:
    """Add one event of a stream to the answer."""
    if "choices" not in chunk:
        answer.failure = BROKEN
        return
    for choice in chunk["choices"]:
        answer.text += text_of(choice)
        client.received += 1
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]
