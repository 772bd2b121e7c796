"""Gives each worker the ports that the user named, and refuses a port that two would take."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dynamo_vllm.config.rules.flags import flag
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import FrontendOptions


class AssignedPorts:
    """Assigns ports: workers with the same first port get consecutive ones."""

    def __init__(self, front: FrontendOptions) -> None:
        self._owners = {front.port: "--port"}
        self._counts: Counter[tuple[str, int]] = Counter()

    @property
    def named(self) -> frozenset[int]:
        """All assigned ports, and the frontend's."""
        return frozenset(self._owners)

    def next(self, name: str, option: str, first: int | None, count: int = 1) -> int | None:
        """Return the first of `count` ports for the worker `name`; None if the user named none."""
        if not first:
            return None
        mine = first + self._counts[option, first]
        self._counts[option, first] += count
        for port in range(mine, mine + count):
            if port in self._owners or port > 65535:
                why = f"is taken by {self._owners[port]}" if port in self._owners else "is not a port"
                raise ConfigError(f"{flag(option)} {first}: {port} for {name} {why}; name another")
            self._owners[port] = f"{flag(option)} of {name}"
        return mine
