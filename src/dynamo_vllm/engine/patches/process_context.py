"""Lets us choose the `multiprocessing` context with which vLLM starts engine cores and their coordinator.

What is wrong: vLLM 0.30 spawns or forks them, depending on a variable that allows nothing else.

What we do: within `using`, vLLM gets our context instead of one of `multiprocessing`. `process.core_fork` has
one that forks from a zygote. Without the patch vLLM spawns, which takes longer.

It can go when vLLM accepts a context as an argument.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dynamo_vllm.engine.patches.patch import Where, in_vllm, source, wrap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.context import BaseContext

_context: BaseContext | None = None


@contextlib.contextmanager
def using(context: BaseContext) -> Iterator[None]:
    """Has vLLM start its processes with this context."""
    global _context
    _context = context
    try:
        yield
    finally:
        _context = None


def apply() -> None:
    from vllm.v1.engine import coordinator, utils

    for module in (coordinator, utils):
        wrap(module, "get_mp_context", _ours_or_theirs)


def _ours_or_theirs(theirs: Callable[[], object]) -> Callable[[], object]:
    def get_mp_context() -> object:
        return theirs() if _context is None else _context

    return get_mp_context


def still_needed() -> bool:
    from vllm.v1.engine import coordinator, utils

    makers = (utils.CoreEngineProcManager.__init__, coordinator.DPCoordinator.__init__)
    return all("context = get_mp_context()" in source(maker) for maker in makers)


PATCHES = (
    in_vllm(
        name="process-context",
        targets=("vllm.v1.engine.coordinator.get_mp_context", "vllm.v1.engine.utils.get_mp_context"),
        defect="engine cores can only be spawned, or forked from the worker",
        where=(Where.WORKER, Where.NODE),
        apply=apply,
        still_needed=still_needed,
    ),
)
