"""Makes NIXL's progress thread pause between polls.

What is wrong: NIXL (1.3 to 1.5) sets no pause for an agent created from Python. Its thread polls all the time
and uses a whole core per engine.

What we do: set a pause for every agent, if this process wants one; a running transfer wakes the thread
earlier.

It can go when `nixl_agent_config` has an option for the pause.
"""

from __future__ import annotations

import contextlib
import inspect
import os

from dynamo_vllm.engine.patches.patch import Patch, Where
from dynamo_vllm.engine.process.environment import NIXL_PAUSE_VARIABLE

_MARK = "dynamo_vllm_pause_us"
_own_us: int | None = None


def set_pause(pause_us: int) -> None:
    """Sets the pause for agents of this process. The environment variable of vLLM's processes wins."""
    global _own_us
    _own_us = pause_us


def _pause_us() -> int | None:
    given = os.environ.get(NIXL_PAUSE_VARIABLE)
    return int(given) if given else _own_us


def is_wanted() -> bool:
    return _pause_us() is not None


def apply() -> None:
    pause_us = _pause_us()
    with contextlib.suppress(ImportError):
        from nixl import _api

        make_agent = _api.nixlBind.nixlAgent
        if hasattr(make_agent, _MARK):
            return

        def agent(name: str, config: object) -> object:
            config.pthrDelay = pause_us  # type: ignore[attr-defined]
            return make_agent(name, config)

        setattr(agent, _MARK, pause_us)
        _api.nixlBind.nixlAgent = agent


def still_needed() -> bool:
    from nixl import _api

    return "agent_config.pthrDelay = 0" in inspect.getsource(_api.nixl_agent)


PATCHES = (
    Patch(
        name="nixl-pause",
        targets=("nixl._api.nixlBind.nixlAgent",),
        package="nixl",
        versions=">=1.3.2,<1.6",
        defect="the progress thread of an agent polls without a pause and uses a whole core",
        where=(Where.ENGINE, Where.TRANSFER),
        apply=apply,
        still_needed=still_needed,
        only_if=is_wanted,
    ),
)
