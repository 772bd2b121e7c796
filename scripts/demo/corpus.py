"""Conversations as token ids in flat files that are mapped into memory: `ids`, `learnt`, `starts`.

No torch here: many processes make the data, and each starts with this module.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from demo.generator.base import Example
from demo.generator.mix import train_example
from demo.marks import Marker
from demo.template import render

CHUNK = 2000
LONGEST = 2048
"""Tokens; longer conversations are left out."""

Make = Callable[[int, int], Example]


@dataclass(frozen=True)
class Data:
    ids: NDArray[np.uint16]
    learnt: NDArray[np.uint8]
    starts: NDArray[np.int64]
    """Where each conversation begins, and the end of the last."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("ids", "learnt", "starts"):
            np.save(folder / f"{name}.npy", getattr(self, name))

    @staticmethod
    def load(folder: Path) -> Data:
        return Data(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("ids", "learnt", "starts")))


def build(
    tokenizer: Tokenizer, seed: int, count: int, make: Make = train_example, processes: int = 0
) -> Data:
    """So many conversations of a seed; the same ones whatever the number of processes."""
    tasks = [(seed, first, min(CHUNK, count - first)) for first in range(0, count, CHUNK)]
    parts = in_processes(_chunk, tasks, _prepare, (tokenizer.to_str(), make), processes)
    ids, learnt, lengths = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return Data(ids, learnt, np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))))


def in_processes(
    work: Callable[[Any], Any],
    tasks: Sequence[Any],
    prepare: Callable[..., None],
    arguments: tuple[Any, ...],
    processes: int = 0,
) -> list[Any]:
    """In all cores; a single task here, since a process takes seconds to start."""
    if len(tasks) == 1:
        prepare(*arguments)
        return [work(tasks[0])]
    count = min(len(tasks), processes or os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count, initializer=prepare, initargs=arguments) as pool:
        return pool.map(work, tasks, chunksize=1)


_worker: dict[str, Any] = {}


def _prepare(tokenizer: str, make: Make) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker["tokenizer"] = Tokenizer.from_str(tokenizer)
    _worker["make"] = make


def _chunk(task: tuple[int, int, int]) -> tuple[NDArray[Any], ...]:
    seed, first, count = task
    tokenizer, make = _worker["tokenizer"], _worker["make"]
    marker = Marker(tokenizer)
    examples = [make(seed, index) for index in range(first, first + count)]
    encoded = tokenizer.encode_batch([render(example) for example in examples])
    rows = [
        (one.ids, marker.mark(example, one.ids))
        for example, one in zip(examples, encoded, strict=True)
        if len(one.ids) <= LONGEST
    ]
    return (
        np.fromiter((value for ids, _ in rows for value in ids), np.uint16),
        np.fromiter((value for _, learnt in rows for value in learnt), np.uint8),
        np.fromiter((len(ids) for ids, _ in rows), np.int64),
    )
