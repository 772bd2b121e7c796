"""Keeps a copy of all keys and tenants in memory, so that no request waits for the database to be known."""

from __future__ import annotations

import enum
import hashlib
import hmac
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.store.keys import (
    ANYBODY,
    FIXED_PREFIX,
    KEY_COLUMNS,
    TENANT_COLUMNS,
    Key,
    Tenant,
    key_of,
    tenant_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.gateway.database import Database, Transaction


class NoKey(enum.Enum):
    """Why a secret opens nothing; the value completes "the API key …"."""

    UNKNOWN = "is not known"
    REVOKED = "was revoked"
    EXPIRED = "has expired"
    ROTATED = "was replaced by a new one"


@dataclass(frozen=True, slots=True)
class _Secret:
    digest: bytes
    key_id: str
    ends: float | None = None
    """When it was replaced, and its grace time ends."""


@dataclass(frozen=True, slots=True)
class _Changes:
    version: int
    is_everything: bool
    keys: list[tuple[bytes, Key]]
    secrets: list[_Secret]
    tenants: list[Tenant]


class KeyRing:
    """Finds keys by their secret; `refresh` brings the changes of the last moments.

    Fixed keys, from the command line, have ids flag-1, flag-2, …: they belong to the tenant "default", have
    no limits, and open everything but the admin endpoints. In an open gateway every caller has the key
    `ANYBODY`, whatever secret it sends.
    """

    def __init__(self, database: Database, fixed: Sequence[str] = (), *, is_open: bool = False) -> None:
        self.is_open = is_open
        self._database = database
        self._version = -1
        self._keys: dict[str, Key] = {}
        self._secrets: dict[bytes, _Secret] = {}
        self._current: dict[str, bytes] = {}
        self._tenants: dict[str, Tenant] = {}
        self._fixed: dict[bytes, tuple[bytes, Key]] = {}
        for number, secret in enumerate(fixed, 1):
            digest = digest_of(secret)
            name = f"{FIXED_PREFIX}{number}"
            self._fixed[digest] = digest, Key(name, name, f"--api-key {number}")

    def __len__(self) -> int:
        return len(self._keys) + len(self._fixed)

    def find(self, secret: str, now: float | None = None) -> Key | NoKey:
        """Return the key that a secret opens, or why it opens none."""
        return ANYBODY if self.is_open else self.find_digest(digest_of(secret), now)

    def find_digest(self, digest: bytes, now: float | None = None) -> Key | NoKey:
        """Return the key of the secret with this digest, or why there is none; for who keeps no secrets."""
        if (fixed := self._fixed.get(digest)) is not None and hmac.compare_digest(fixed[0], digest):
            return fixed[1]
        found = self._secrets.get(digest)
        if found is None or not hmac.compare_digest(found.digest, digest):
            return NoKey.UNKNOWN
        key = self._keys.get(found.key_id)
        if key is None:  # created and given another secret while we read; the next refresh has it
            return NoKey.UNKNOWN
        now = time.time() if now is None else now
        state = key.state(now)
        if state != "active":
            return NoKey.REVOKED if state == "revoked" else NoKey.EXPIRED
        if found.ends is not None and found.ends <= now:
            return NoKey.ROTATED
        return key

    def key(self, key_id: str) -> Key | None:
        """Return a key by its id, also a revoked one."""
        if self.is_open and key_id == ANYBODY.id:
            return ANYBODY
        return self._keys.get(key_id) or next((k for _, k in self._fixed.values() if k.id == key_id), None)

    def usable(self, key_id: str, now: float | None = None) -> Key | None:
        """Return a key by its id if it is neither revoked nor expired."""
        key = self.key(key_id)
        return key if key is not None and key.state(time.time() if now is None else now) == "active" else None

    def tenant(self, name: str) -> Tenant:
        """Return a tenant; one without settings has no limits."""
        return self._tenants.get(name) or Tenant(name)

    async def refresh(self) -> bool:
        """Return whether something changed. Only what changed is read."""
        known = self._version
        changes = await self._database.run(lambda t: _changes(t, known))
        if changes is None:
            return False
        if changes.is_everything:
            for copy in (self._keys, self._secrets, self._current, self._tenants):
                copy.clear()
        self._take(changes)
        return True

    def _take(self, changes: _Changes) -> None:
        for digest, key in changes.keys:
            before = self._current.get(key.id)
            if before is not None and before != digest:  # its row of the old secrets comes below
                self._secrets.pop(before, None)
            self._keys[key.id] = key
            self._current[key.id] = digest
            self._secrets[digest] = _Secret(digest, key.id)
        for secret in changes.secrets:
            self._secrets[secret.digest] = secret
        for tenant in changes.tenants:
            self._tenants[tenant.name] = tenant
        self._version = changes.version


def _changes(t: Transaction, known: int) -> _Changes | None:
    row = t.one("SELECT version FROM gateway_version WHERE id = 1")
    version = int(row[0]) if row is not None else 0
    if version == known:
        return None
    if version < known:  # the database was replaced by an older copy
        known = -1
    keys = t.all(f"SELECT hash, {KEY_COLUMNS} FROM gateway_keys WHERE version > ?", known)
    secrets = t.all("SELECT hash, key, ends FROM gateway_old_secrets WHERE version > ?", known)
    tenants = t.all(f"SELECT {TENANT_COLUMNS} FROM gateway_tenants WHERE version > ?", known)
    # A change that commits between these statements has a higher version, and comes again next time. The rows
    # are read here, in the database's thread, so that the event loop goes on.
    return _Changes(
        version,
        known == -1,
        [(bytes.fromhex(row[0]), key_of(row[1:])) for row in keys],
        [_Secret(bytes.fromhex(hashed), key_id, ends) for hashed, key_id, ends in secrets],
        [tenant_of(row) for row in tenants],
    )


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
