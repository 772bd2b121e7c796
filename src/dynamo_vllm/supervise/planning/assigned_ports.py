"""Gives each process the ports that the user named, and refuses a port that two would take."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
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
        self._assigned: defaultdict[str, list[_Range]] = defaultdict(list)
        """By worker."""
        self._returned: list[_Range] = []

    @property
    def named(self) -> frozenset[int]:
        """All assigned ports, with those of what is no worker."""
        return frozenset(self._owners)

    def keep(self, port: int, owner: str) -> None:
        """Give a port to something that is no worker; raise if it is another's."""
        if port in self._owners:
            raise ConfigError(f"{owner} {port} is taken by {self._owners[port]}; name another")
        self._owners[port] = owner

    def next(self, name: str, option: str, first: int | None, count: int = 1) -> int | None:
        """Return the first of `count` ports for the worker `name`; None if the user named none."""
        if not first:
            return None
        mine = self._take(option, first, count)
        self._assigned[name].append(_Range(option, first, mine, count))
        for port in range(mine, mine + count):
            if port in self._owners or port > 65535:
                why = f"is taken by {self._owners[port]}" if port in self._owners else "is not a port"
                raise ConfigError(f"{flag(option)} {first}: {port} for {name} {why}; name another")
            self._owners[port] = f"{flag(option)} of {name}"
        return mine

    def release(self, name: str) -> None:
        """Take back the ports of a worker; the next one gets them."""
        for ports in self._assigned.pop(name, ()):
            for port in range(ports.mine, ports.mine + ports.count):
                if self._owners.get(port) == f"{flag(ports.option)} of {name}":
                    del self._owners[port]
            self._returned.append(ports)

    def _take(self, option: str, first: int, count: int) -> int:
        """Return the lowest range that a worker gave back, or the next one."""
        fitting = [
            ports
            for ports in self._returned
            if (ports.option, ports.first, ports.count) == (option, first, count)
        ]
        if fitting:
            lowest = min(fitting, key=lambda ports: ports.mine)
            self._returned.remove(lowest)
            return lowest.mine
        mine = first + self._counts[option, first]
        self._counts[option, first] += count
        return mine


@dataclass(frozen=True, slots=True)
class _Range:
    """Ports of one option of one worker; `first` is what the user named."""

    option: str
    first: int
    mine: int
    count: int
