"""Keeps the demo models busy: conversations over the same beginnings, images, short questions."""

from __future__ import annotations

import base64
import contextlib
import io
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from PIL import Image, ImageDraw

COLOURS = {"red": "#d62728", "blue": "#1f5fd6", "green": "#2ca02c", "yellow": "#f2c40f", "black": "#111111"}
SHAPES = ("square", "circle", "triangle")
HANDBOOKS = 6
RULES = (
    "Answer in one sentence.",
    "Say which flag to use.",
    "Name the page of the documentation.",
    "Do not guess a number.",
    "Use the words of the documentation.",
    "If you do not know, say so.",
)
QUESTIONS = (
    "Do I need etcd?",
    "What is a worker?",
    "What is 608 - 39?",
    "Count from 3 to 9.",
    "What does the router do?",
    "My name is Clara.",
    "What is my name?",
    "What is 71 + 24?",
)


def figure(colour: str, shape: str, size: int = 96) -> bytes:
    """Draw one figure of the kind that demo-vision knows, as a PNG."""
    picture = Image.new("RGB", (size, size), "white")
    pen, edge = ImageDraw.Draw(picture), size // 4
    box = (edge, edge, size - edge, size - edge)
    if shape == "square":
        pen.rectangle(box, fill=COLOURS[colour])
    elif shape == "circle":
        pen.ellipse(box, fill=COLOURS[colour])
    else:
        pen.polygon(
            [(size // 2, edge), (edge, size - edge), (size - edge, size - edge)], fill=COLOURS[colour]
        )
    out = io.BytesIO()
    picture.save(out, "PNG")
    return out.getvalue()


def handbook(number: int) -> str:
    """Return a long beginning that conversations share."""
    chance = random.Random(number)
    rules = [f"Rule {n}: {chance.choice(RULES)}" for n in range(1, 14 + 5 * number)]
    return f"Handbook {number}. " + " ".join(rules)


class MixedLoad:
    """A few clients, each with one request at a time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.answers = 0
        self.failures: list[str] = []

    def stop(self) -> None:
        self._stop.set()

    def run(self, number: int, models: Mapping[str, float]) -> None:
        """Ask these models, each with its share; demo-vision gets images too."""
        chance = random.Random(number)
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.is_set():
                self._talk(client, chance, models)

    def _talk(self, client: httpx.Client, chance: random.Random, models: Mapping[str, float]) -> None:
        model = chance.choices([*models], [*models.values()])[0]
        book = min(int(chance.expovariate(0.6)), HANDBOOKS - 1)
        messages: list[dict[str, Any]] = [{"role": "system", "content": handbook(book)}]
        for _ in range(chance.randint(1, 4)):
            if self._stop.is_set():
                return
            content: Any = chance.choice(QUESTIONS)
            if model == "demo-vision" and chance.random() < 0.4:
                content = with_picture("What do you see?", chance)
            messages.append({"role": "user", "content": content})
            said = self._ask(
                client, {"model": model, "messages": messages, "max_tokens": chance.randint(12, 48)}
            )
            messages.append({"role": "assistant", "content": said or "…"})

    def _ask(self, client: httpx.Client, body: dict[str, Any]) -> str:
        answer = client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self.failures.append(answer.text[:300])
            return ""
        self.answers += 1
        return str(answer.json()["choices"][0]["message"]["content"] or "")


def with_picture(text: str, chance: random.Random) -> list[dict[str, Any]]:
    drawn = base64.b64encode(figure(chance.choice([*COLOURS]), chance.choice(SHAPES))).decode()
    url = f"data:image/png;base64,{drawn}"
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


@contextlib.contextmanager
def mixed_load(url: str, clients: Sequence[Mapping[str, float]]) -> Iterator[MixedLoad]:
    """Run a client for each of these, which says what it asks."""
    load = MixedLoad(url)
    threads = [threading.Thread(target=load.run, args=one) for one in enumerate(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop()
        for thread in threads:
            thread.join(150)
