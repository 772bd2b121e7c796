"""Batches of conversations for training.

Each conversation is a row of its own, so none sees another and attention needs no mask; rows of a batch are
about as long, so little is padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from demo.corpus import LONGEST, Data

LENGTHS = (64, 96, 128, 192, 256, 384, 512, 1024, LONGEST)
"""Rows are padded to one of these."""


@dataclass(frozen=True)
class Batch:
    ids: torch.Tensor
    answers: torch.Tensor
    """Where the next id is learnt; positions of all rows, one after the other."""
    targets: torch.Tensor
    """The next ids there."""
    rows: NDArray[Any]
    """Which of the data they are."""


class Batches:
    """Batches of about equally long rows, in random order, epoch after epoch.

    They are made on the CPU and copied without waiting, so that a GPU never waits for the next one.
    With `kinds`, a number for each row, all rows of a batch are of one kind.
    """

    def __init__(
        self,
        data: Data,
        tokens: int,
        seed: int,
        device: str,
        lengths: Sequence[int] = LENGTHS,
        kinds: NDArray[Any] | None = None,
    ) -> None:
        self.tokens, self.device, self.lengths = tokens, device, lengths
        self.kinds = np.zeros(len(data), np.int64) if kinds is None else kinds
        self.random = np.random.default_rng(seed)
        self.ids, self.learnt = np.asarray(data.ids), np.asarray(data.learnt)
        self.starts, self.sizes = np.asarray(data.starts[:-1]), np.diff(data.starts)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            groups: list[tuple[int, NDArray[Any]]] = []
            for shorter, length, kind in self._sorts():
                fits = (self.sizes > shorter) & (self.sizes <= length) & (self.kinds == kind)
                rows, size = np.flatnonzero(fits), max(1, self.tokens // length)
                self.random.shuffle(rows)
                # The last, incomplete one is left for another epoch: every batch of a length has one shape.
                whole = len(rows) // size * size if len(rows) >= size else len(rows)
                groups += [(length, rows[at : at + size]) for at in range(0, whole, size)]
            for index in self.random.permutation(len(groups)):
                yield self._batch(*groups[index])

    def _sorts(self) -> Iterator[tuple[int, int, int]]:
        """Rows that may share a batch: longer than, at most as long as, of which kind."""
        for shorter, length in pairwise((0, *self.lengths)):
            for kind in np.unique(self.kinds):
                yield shorter, length, int(kind)

    def _batch(self, length: int, rows: NDArray[Any]) -> Batch:
        offsets = np.arange(length + 1)
        inside = offsets < self.sizes[rows, None]
        at = np.where(inside, self.starts[rows, None] + offsets, 0)
        ids = np.where(inside, self.ids[at], 0).astype(np.int64)
        answers = np.flatnonzero((self.learnt[at] > 0)[:, 1:] & inside[:, 1:])
        targets = ids[:, 1:].reshape(-1)[answers]
        return Batch(
            copied(ids[:, :-1], self.device),
            copied(answers, self.device),
            copied(targets, self.device),
            rows,
        )


def copied(numbers: NDArray[Any], device: str) -> torch.Tensor:
    """On the device; from pinned memory, which is copied while the GPU does something else."""
    made = torch.from_numpy(np.ascontiguousarray(numbers))
    return made.pin_memory().to(device, non_blocking=True) if device == "cuda" else made.to(device)
