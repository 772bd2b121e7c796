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
    targets: torch.Tensor
    """The next id where it is learnt, else -100."""
    learnt: int
    rows: NDArray[Any]
    """Which of the data they are."""


class Batches:
    """Batches of about equally long rows, in random order, epoch after epoch; the data lies on the device.

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
        # One id more than there is: a row is read as its length plus the next id.
        self.ids = torch.from_numpy(np.append(data.ids, 0).astype(np.int16)).to(device)
        self.learnt = torch.from_numpy(np.append(data.learnt, 0)).to(device)
        self.starts = np.asarray(data.starts[:-1])
        self.sizes = np.diff(data.starts)
        sums = np.concatenate(([0], np.cumsum(data.learnt, dtype=np.int64)))
        self.answers = sums[data.starts[1:]] - sums[data.starts[:-1]]

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
        starts = torch.from_numpy(self.starts[rows]).to(self.device)
        sizes = torch.from_numpy(self.sizes[rows]).to(self.device)
        offsets = torch.arange(length + 1, device=self.device)
        inside = offsets < sizes[:, None]
        at = (starts[:, None] + offsets).where(inside, 0)
        ids = self.ids[at].long().where(inside, 0)
        targets = ids.where((self.learnt[at] > 0) & inside, -100)
        return Batch(ids[:, :-1], targets[:, 1:], int(self.answers[rows].sum()), rows)
