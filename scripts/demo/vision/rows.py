"""Conversations about pictures as numbers: token ids, and what to paint for them.

No torch here: many processes make the data, and each starts with this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.corpus import CHUNK, Data, in_processes
from demo.marks import Marker
from demo.template import render
from demo.vision.figures import COLOURS, MOST, SHAPES, Scene
from demo.vision.talks import train_talk

COLUMNS = ("shape", "colour", "x", "y", "radius", "turn", "red", "green", "blue", "outline")
NONE = -1.0
"""In the column of the shape, where there is no figure."""


@dataclass(frozen=True)
class Scenes:
    """Scenes as numbers: `figures` [N, MOST, columns], `backgrounds` [N, 3]."""

    figures: NDArray[np.float32]
    backgrounds: NDArray[np.uint8]

    @staticmethod
    def of(scenes: Sequence[Scene]) -> Scenes:
        figures = np.zeros((len(scenes), MOST, len(COLUMNS)), np.float32)
        figures[:, :, 0] = NONE
        colours = tuple(COLOURS)
        for row, scene in enumerate(scenes):
            for at, one in enumerate(scene.figures):
                kind = SHAPES.index(one.shape), colours.index(one.colour)
                figures[row, at] = (*kind, one.x, one.y, one.radius, one.turn, *one.tint, one.outline)
        return Scenes(figures, np.array([scene.background for scene in scenes], np.uint8).reshape(-1, 3))


@dataclass(frozen=True)
class Rows:
    """Conversations, and the scenes of all of them one after the other."""

    data: Data
    scenes: Scenes
    starts: NDArray[np.int64]
    """Where the scenes of each conversation begin, and the end of the last."""

    @property
    def shown(self) -> NDArray[np.int64]:
        """How many pictures each conversation has."""
        return np.diff(self.starts)


def build(tokenizer: Tokenizer, seed: int, count: int, image_token: int, patches: int) -> Rows:
    """So many conversations of a seed; the same ones whatever the number of processes."""
    tasks = [(seed, first, min(CHUNK, count - first)) for first in range(0, count, CHUNK)]
    parts = in_processes(_chunk, tasks, _prepare, (tokenizer.to_str(), image_token, patches))
    ids, learnt, lengths, figures, backgrounds, shown = (
        np.concatenate(columns) for columns in zip(*parts, strict=True)
    )
    return Rows(Data(ids, learnt, _starts(lengths)), Scenes(figures, backgrounds), _starts(shown))


def widened(ids: Sequence[int], image_token: int, patches: int) -> list[int]:
    """With the image token once for each patch, as servers do it."""
    return [one for value in ids for one in ([value] * patches if value == image_token else [value])]


def _starts(lengths: NDArray[Any]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))


_worker: dict[str, Any] = {}


def _prepare(tokenizer: str, image_token: int, patches: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker.update(tokenizer=Tokenizer.from_str(tokenizer), image_token=image_token, patches=patches)


def _chunk(task: tuple[int, int, int]) -> tuple[NDArray[Any], ...]:
    seed, first, count = task
    tokenizer, image_token, patches = (_worker[name] for name in ("tokenizer", "image_token", "patches"))
    marker = Marker(tokenizer)
    talks = [train_talk(seed, index) for index in range(first, first + count)]
    encoded = tokenizer.encode_batch([render(talk.example) for talk in talks])
    ids: list[int] = []
    learnt: list[int] = []
    lengths: list[int] = []
    for talk, one in zip(talks, encoded, strict=True):
        row = np.asarray(one.ids)
        times = np.where(row == image_token, patches, 1)
        ids += np.repeat(row, times).tolist()
        learnt += np.repeat(marker.mark(talk.example, one.ids), times).tolist()
        lengths.append(int(times.sum()))
    scenes = Scenes.of([scene for talk in talks for scene in talk.scenes])
    return (
        np.array(ids, np.uint16),
        np.array(learnt, np.uint8),
        np.array(lengths, np.int64),
        scenes.figures,
        scenes.backgrounds,
        np.array([len(talk.scenes) for talk in talks], np.int64),
    )
