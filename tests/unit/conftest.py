"""Spares the tier most of the garbage collector's work: thousands of tests make no garbage worth a look."""

from __future__ import annotations

import gc

gc.set_threshold(20_000, 20, 20)


def pytest_collection_finish() -> None:
    """What was imported and collected stays: later collections need not look at it."""
    gc.collect()
    gc.freeze()
