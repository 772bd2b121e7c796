"""Gives failures of the runtime a class of their own: it raises nothing narrower than Exception."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dynamo_vllm.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Iterator


class RuntimeFailed(Exception):
    """The runtime did not do what it was asked for."""


@contextlib.contextmanager
def of_runtime() -> Iterator[None]:
    """Raise what a call of the runtime raises as RuntimeFailed, with its text."""
    try:
        yield
    except StartError:
        raise
    except Exception as exc:
        raise RuntimeFailed(str(exc) or type(exc).__name__) from exc
