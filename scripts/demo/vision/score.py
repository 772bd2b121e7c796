"""Scores demo-vision on pictures and wordings it was never trained on: in torch, or over HTTP."""

from __future__ import annotations

import concurrent.futures
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.answers import Answer, parse
from demo.score import SEED, Score, judge, read
from demo.template import messages, prompt
from demo.tokenizer import TURN_END
from demo.vision.drawing import data_url, draw, noise_seed
from demo.vision.figures import Scene
from demo.vision.model import Llava
from demo.vision.painting import paint
from demo.vision.rows import Scenes, widened
from demo.vision.talks import HELD_OUT, Talk, held_out

SIZE = 96
"""Of the pictures that are sent; a server makes any size into the model's."""
MAX_TOKENS = 48

Ask = Callable[[Sequence[Talk]], list[Answer]]


def score(ask: Ask, count: int, skills: Sequence[str] = tuple(HELD_OUT), seed: int = SEED) -> list[Score]:
    scores = []
    for skill in skills:
        talks = list(held_out(skill, seed, count))
        scores.append(judge(skill, [talk.example for talk in talks], ask(talks)))
    return scores


def in_torch(model: Llava, tokenizer: Tokenizer, rows: int = 128, max_tokens: int = MAX_TOKENS) -> Ask:
    end, device = tokenizer.token_to_id(TURN_END), next(model.parameters()).device

    def some(talks: Sequence[Talk]) -> list[Answer]:
        prompts = [
            widened(tokenizer.encode(prompt(talk.example)).ids, model.image_token, model.tower.tokens)
            for talk in talks
        ]
        pictures = pictures_of([scene for talk in talks for scene in talk.scenes], model.tower.image_size)
        said = model.greedy(prompts, pictures.to(device), end, max_tokens)
        return [parse(tokenizer.decode(ids, skip_special_tokens=False)) for ids in said]

    def ask(talks: Sequence[Talk]) -> list[Answer]:
        return [one for at in range(0, len(talks), rows) for one in some(talks[at : at + rows])]

    return ask


def pictures_of(scenes: Sequence[Scene], size: int) -> torch.Tensor:
    """Drawn with Pillow where it is, else as in training."""
    if importlib.util.find_spec("PIL") is None:
        numbers = Scenes.of(scenes)
        return paint(
            torch.from_numpy(numbers.figures), torch.from_numpy(numbers.backgrounds), size, varied=False
        )
    return torch.from_numpy(np.stack([drawn(scene, size) for scene in scenes]))


def drawn(scene: Scene, size: int = SIZE) -> NDArray[np.uint8]:
    return draw(scene, size, noise_seed(scene))


def over_http(url: str, model: str, at_once: int = 8) -> Ask:
    """As a client of the OpenAI API, with the pictures as data URLs."""
    import httpx

    client = httpx.Client(base_url=url, timeout=120)

    def one(talk: Talk) -> Answer:
        body = {
            "model": model,
            "messages": with_pictures(talk),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        reply = client.post("/chat/completions", json=body)
        reply.raise_for_status()
        return read(reply.json()["choices"][0]["message"])

    def ask(talks: Sequence[Talk]) -> list[Answer]:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, talks))

    return ask


def with_pictures(talk: Talk, size: int = SIZE) -> list[dict[str, Any]]:
    """All but the answer, as a client sends it."""
    said, scenes = messages(talk.example.turns[:-1]), iter(talk.scenes)
    for message in said:
        if isinstance(message["content"], list):
            message["content"] = [
                {"type": "image_url", "image_url": {"url": data_url(drawn(next(scenes), size))}}
                if part["type"] == "image"
                else part
                for part in message["content"]
            ]
    return said
