"""Knows who has logged in: with the admin token, or with a key of the gateway that has --admin."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import secrets
import time
from typing import TYPE_CHECKING, Protocol

from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.gateway.envoy.console import PATH
from dynamo_vllm.gateway.store.key_ring import KeyRing, digest_of
from dynamo_vllm.gateway.store.keys import Key

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.database import Database

logger = logging.getLogger(__name__)
SESSION_SECONDS = 12 * 3600.0
MOST_SESSIONS = 64
WRONG_TOKENS, MOST_WRONG_TOKENS = 10, 100
"""Within `WRONG_SECONDS`: of one client, and of all; beyond that each client has one try."""
MOST_NOTED = 10_000
WRONG_SECONDS = 60.0
REFRESH_SECONDS = 2.0
"""After so long a key that was revoked lets nobody do anything."""


class AdminKeys(Protocol):
    """Keys that log in."""

    async def refresh(self) -> None:
        """Learn what has changed."""

    def is_good(self, digest: bytes) -> bool:
        """Return whether the secret with this digest opens a key that may log in, now."""


class GatewayKeys:
    """The keys of a gateway that were created with --admin; no secret is kept."""

    def __init__(self, database: Database) -> None:
        self._ring = KeyRing(database)

    async def refresh(self) -> None:
        await self._ring.refresh()

    def is_good(self, digest: bytes) -> bool:
        found = self._ring.find_digest(digest)
        # A key for some endpoints, such as one with which Prometheus reads /metrics, is no operator's.
        return isinstance(found, Key) and found.scopes.admin and found.scopes.allow_path(PATH)

    async def run(self) -> None:
        """Learn of revoked keys until cancelled."""
        is_told = False
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            try:
                await self.refresh()
                is_told = False
            except DynamoVllmError as exc:  # the copy of the last time is used meanwhile
                if not is_told:
                    logger.warning("keys of the gateway cannot be read: %s", exc)
                is_told = True


class Sessions:
    """Who has logged in; forgotten when the console ends."""

    def __init__(
        self,
        token: str | None,
        keys: AdminKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._keys = keys
        self._clock = clock
        self._open: dict[str, tuple[float, bytes | None]] = {}
        """Until when each session lasts, and the digest of the key that opened it."""
        self._wrong: list[tuple[float, str]] = []

    @property
    def words(self) -> str:
        """What one logs in with."""
        token, key = "the value of --admin-token", "a key of the gateway with --admin"
        if self._keys is None:
            return token
        return key if self._token is None else f"{token}, or {key}"

    async def open(self, given: str, client: str = "") -> str:
        """Return the secret of a new session; raise for a wrong token. `client` is where it comes from."""
        now = self._clock()
        attempt = (now, network_of(client))
        self._refuse_too_many(*attempt)
        self._wrong.append(attempt)  # before anything is awaited, so that many at once count too
        del self._wrong[:-MOST_NOTED]
        digest = None
        if not self._is_token(given):
            try:
                digest = await self._admin_key(given)
            except (ConsoleError, asyncio.CancelledError):  # nobody could tell whether it was wrong
                self._forgive(attempt)
                raise
            if digest is None:
                raise ConsoleError(401, "this does not log in", f"give {self.words}")
        self._forgive(attempt)
        made = secrets.token_urlsafe(32)
        self._open = {one: about for one, about in self._open.items() if about[0] > now}
        while len(self._open) >= MOST_SESSIONS:
            del self._open[next(iter(self._open))]
        self._open[made] = (now + SESSION_SECONDS, digest)
        return made

    def _refuse_too_many(self, now: float, client: str) -> None:
        self._wrong = [one for one in self._wrong if now - one[0] < WRONG_SECONDS]
        of_client = sum(1 for _, other in self._wrong if other == client)
        most = WRONG_TOKENS if len(self._wrong) < MOST_WRONG_TOKENS else 1
        if of_client >= most:
            raise ConsoleError(429, "too many wrong tokens", f"try again in {WRONG_SECONDS:.0f} s")

    def _forgive(self, attempt: tuple[float, str]) -> None:
        with contextlib.suppress(ValueError):  # it was long ago
            self._wrong.remove(attempt)

    def _is_token(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())

    async def _admin_key(self, given: str) -> bytes | None:
        """Return the digest of an admin key; None for anything else."""
        if self._keys is None:
            return None
        try:
            await self._keys.refresh()
        except DynamoVllmError as exc:
            logger.warning("keys of the gateway cannot be read: %s", exc)
            raise ConsoleError(503, "the gateway's database does not answer", "try again later") from None
        digest = digest_of(given)
        return digest if self._keys.is_good(digest) else None

    def is_open(self, secret: str | None) -> bool:
        """Return whether this session lasts; one of a key ends with the key."""
        until, digest = self._open.get(secret or "", (0.0, None))
        if until <= self._clock():
            return False
        return digest is None or (self._keys is not None and self._keys.is_good(digest))

    def close(self, secret: str | None) -> None:
        self._open.pop(secret or "", None)


def network_of(client: str) -> str:
    """Return what stands for a client: its address, of IPv6 the network that one household has.

    Whoever is on this machine can send from each of its 16 million addresses 127.0.0.0/8.
    """
    address = _address(client)
    if address is None:
        return client
    bits = 64 if address.version == 6 else 8 if address.is_loopback else 32
    return str(ipaddress.ip_network((address, bits), strict=False))


def is_this_machine(client: str) -> bool:
    address = _address(client)
    return address is not None and address.is_loopback


def _address(client: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return None
    # A server on :: sees clients of IPv4 so; as a network of IPv6 they would be one.
    return getattr(address, "ipv4_mapped", None) or address
