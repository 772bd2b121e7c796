"""Bounds the logins that are under way, so that slow ones keep nobody out.

Everybody may send one, and its body may come slowly or never. An honest one comes in a piece: so the login
that takes longest makes room for the next, and not the next one has to wait.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.console.sessions import network_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")
LOGIN_BYTES = 4096
LOGIN_SECONDS = 5.0
MOST_LOGINS, MOST_LOGINS_OF_CLIENT = 64, 16
"""So many that an honest one is complete before as many others have come after it."""
CLOSES = {"connection": "close", "retry-after": "1"}
"""The rest of the body would be read from a connection that stays open."""


@dataclass(slots=True, eq=False)
class _Login:
    network: str
    limit: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(LOGIN_SECONDS))
    refusal: ConsoleError = field(
        default_factory=lambda: ConsoleError(
            408, f"the login was not complete after {LOGIN_SECONDS:g} s", "try again", CLOSES
        )
    )


class Logins:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._open: list[_Login] = []
        """The oldest first."""

    async def run(self, client: str, read_and_check: Callable[[], Awaitable[T]]) -> T:
        """Return the result; raise ConsoleError if it takes too long, or makes room for another one."""
        login = _Login(network_of(client))
        self._make_room(login.network)
        self._open.append(login)
        try:
            async with login.limit:
                return await read_and_check()
        except TimeoutError:
            if not login.limit.expired():
                raise
            raise login.refusal from None
        finally:
            if login in self._open:
                self._open.remove(login)

    def _make_room(self, network: str) -> None:
        of_client = [login for login in self._open if login.network == network]
        if len(of_client) >= MOST_LOGINS_OF_CLIENT:
            self._end(of_client[0], 429, "too many logins of this address at once")
        elif len(self._open) >= MOST_LOGINS:
            self._end(self._open[0], 503, "too many logins at once")

    def _end(self, login: _Login, status: int, message: str) -> None:
        self._open.remove(login)
        if not login.limit.expired():  # it ends by itself at this moment
            login.refusal = ConsoleError(status, message, "try again", CLOSES)
            login.limit.reschedule(asyncio.get_running_loop().time())
