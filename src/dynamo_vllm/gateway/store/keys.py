"""Creates, lists, changes and ends API keys and tenants in the database.

Each function returns work for `Database.run` or `run_now`. A secret is `dv-`, 8 characters that people may
see (the prefix), `-` and 40 random characters: 238 bits that nobody can guess. The database has its SHA-256
only; a slow hash protects passwords that people choose, here it would only slow down requests.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import string
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import msgspec

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.gateway.store.sql import in_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.gateway.database import Row, Transaction

    T = TypeVar("T")
    Work = Callable[[Transaction], T]

HIGH, NORMAL, LOW, BATCH = "high", "normal", "low", "batch"
CLASSES = (HIGH, NORMAL, LOW, BATCH)
"""Priority classes, the most urgent first."""
DEFAULT_TENANT = "default"
FIXED_PREFIX = "flag-"
"""Ids of keys from the command line, which are not in the database."""
PREFIX_CHARACTERS = 8
SECRET_CHARACTERS = 40
_LETTERS = string.ascii_letters + string.digits
ENDPOINTS = {
    "chat": ("/v1/chat/completions",),
    "completions": ("/v1/completions",),
    "responses": ("/v1/responses",),
    "messages": ("/v1/messages",),
    "embeddings": ("/v1/embeddings", "/v2/embed"),
    "classify": ("/v1/classify",),
    "pooling": ("/v1/pooling",),
    "rerank": ("/v1/rerank", "/rerank", "/v2/rerank"),
    "score": ("/v1/score", "/score"),
    "batches": ("/v1/batches",),
    "files": ("/v1/files",),
    "images": ("/v1/images",),
    "videos": ("/v1/videos",),
    "audio": ("/v1/audio",),
    "transcriptions": ("/v1/audio/transcriptions",),
    "translations": ("/v1/audio/translations",),
    "models": ("/v1/models",),
}
"""Short names of paths in the scopes of a key."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a key or tenant may use; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None

    @property
    def are_none(self) -> bool:
        return self == NO_LIMITS


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Scopes:
    """What a key is for; an empty tuple is everything. Adapters are models with their own name."""

    models: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    """The beginnings of paths, or short names of `ENDPOINTS`."""
    admin: bool = False

    def allow_model(self, model: str) -> bool:
        return not self.models or model in self.models

    def allow_path(self, path: str) -> bool:
        """A beginning ends where a part of the path does: /v1/files allows /v1/files/x, not /v1/files-old."""
        return not self.endpoints or any(
            path == start or path.startswith(start + "/")
            for name in self.endpoints
            for start in endpoint_paths(name)
        )


ALL_SCOPES = Scopes()


def endpoint_paths(name: str) -> tuple[str, ...]:
    return ENDPOINTS.get(name) or (name.rstrip("/"),)


@dataclass(frozen=True, slots=True)
class Key:
    """An API key without its secret."""

    id: str
    prefix: str
    name: str
    tenant: str = DEFAULT_TENANT
    created: float = 0.0
    expires: float | None = None
    revoked: float | None = None
    scopes: Scopes = ALL_SCOPES
    limits: Limits = NO_LIMITS
    priority_class: str | None = None
    """None: that of the tenant."""

    def state(self, now: float) -> str:
        """Return active, revoked or expired."""
        if self.revoked is not None:  # by whichever clock: it ends at once
            return "revoked"
        return "expired" if self.expires is not None and self.expires <= now else "active"


ANYBODY = Key(f"{FIXED_PREFIX}open", "open", "--open", scopes=Scopes(admin=True))
"""The key of every caller of an open gateway."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who pays: the keys of a tenant share its limits. One that nobody set has none."""

    name: str = DEFAULT_TENANT
    limits: Limits = NO_LIMITS
    priority_class: str = NORMAL
    shares_cache: bool = False
    """Whether cached prompts of other tenants that share may answer its requests sooner."""


def class_of(key: Key, tenant: Tenant) -> str:
    return key.priority_class or tenant.priority_class


@dataclass(frozen=True, slots=True)
class NewSecret:
    """A secret that was never shown yet."""

    text: str = field(repr=False)

    @classmethod
    def make(cls) -> NewSecret:
        return cls(f"dv-{_random(PREFIX_CHARACTERS)}-{_random(SECRET_CHARACTERS)}")

    @property
    def prefix(self) -> str:
        return self.text[: len("dv-") + PREFIX_CHARACTERS]


def _random(count: int) -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(count))


def hash_of(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()


# --- changes ----------------------------------------------------------------------------------------------


def create(
    name: str,
    *,
    tenant: str = DEFAULT_TENANT,
    expires: float | None = None,
    scopes: Scopes = ALL_SCOPES,
    limits: Limits = NO_LIMITS,
    priority_class: str | None = None,
    now: float | None = None,
) -> Work[tuple[Key, str]]:
    """Create a key; its secret is returned here and never again."""
    secret = NewSecret.make()
    key = Key(
        id=f"key-{_random(12)}",
        prefix=secret.prefix,
        name=name,
        tenant=tenant,
        created=_time(now),
        expires=expires,
        scopes=scopes,
        limits=limits,
        priority_class=priority_class,
    )

    def work(t: Transaction) -> tuple[Key, str]:
        insert(t, [(key, hash_of(secret.text))])
        return key, secret.text

    return work


def insert(t: Transaction, keys: list[tuple[Key, str]]) -> None:
    """Add keys with the hashes of their secrets. Work that runs a second time changes nothing."""
    version = bump(t)
    t.many(
        f"INSERT INTO gateway_keys (hash, version, {KEY_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?,?,?)"
        " ON CONFLICT (id) DO NOTHING",
        [(hashed, version, *_key_values(key)) for key, hashed in keys],
    )


def revoke(key_id: str, *, now: float | None = None) -> Work[Key]:
    """End a key for good; a second time changes nothing."""

    def work(t: Transaction) -> Key:
        key = get(t, key_id)
        if key.revoked is not None:
            return key
        ended = replace(key, revoked=_time(now))
        t.execute(
            "UPDATE gateway_keys SET revoked = ?, version = ? WHERE id = ?", ended.revoked, bump(t), key_id
        )
        return ended

    return work


def rotate(key_id: str, *, grace_seconds: float = 0.0, now: float | None = None) -> Work[tuple[Key, str]]:
    """Give a key another secret; the old one is valid for `grace_seconds` more, or ends at once.

    The key keeps its id: limits, counters and usage go on, and both secrets share them. Earlier secrets that
    are still in their grace time end at the end of this one, if they do not end before.
    """
    secret = NewSecret.make()

    def work(t: Transaction) -> tuple[Key, str]:
        key = get(t, key_id)
        moment = _time(now)
        if key.state(moment) != "active":
            raise ConfigError(f"key {key.prefix} is {key.state(moment)}; create another one")
        version, ends = bump(t), moment + grace_seconds if grace_seconds > 0 else 0.0
        t.execute(
            "UPDATE gateway_old_secrets SET ends = ?, version = ? WHERE key = ? AND ends > ?",
            *(ends, version, key_id, ends),
        )
        t.execute(
            "INSERT INTO gateway_old_secrets (hash, key, ends, version)"
            " SELECT hash, id, CAST(? AS DOUBLE PRECISION), CAST(? AS BIGINT) FROM gateway_keys WHERE id = ?",
            *(ends, version, key_id),
        )
        t.execute(
            "UPDATE gateway_keys SET hash = ?, prefix = ?, version = ? WHERE id = ?",
            *(hash_of(secret.text), secret.prefix, version, key_id),
        )
        return replace(key, prefix=secret.prefix), secret.text

    return work


def change_key(key_id: str, change: Callable[[Key], Key]) -> Work[Key]:
    """Change the name, expiry, scopes, limits or class of a key."""

    def work(t: Transaction) -> Key:
        key = get(t, key_id)
        changed = replace(change(key), id=key.id, prefix=key.prefix, tenant=key.tenant, created=key.created)
        _, _, name, _, _, expires, revoked, scopes, limits, priority_class = _key_values(changed)
        t.execute(
            "UPDATE gateway_keys SET name = ?, expires = ?, revoked = ?, scopes = ?, limits = ?, class = ?,"
            " version = ? WHERE id = ?",
            *(name, expires, revoked, scopes, limits, priority_class, bump(t), key_id),
        )
        return changed

    return work


def change_tenant(name: str, change: Callable[[Tenant], Tenant] = lambda tenant: tenant) -> Work[Tenant]:
    """Change the settings of a tenant, and remember it if it is new."""

    def work(t: Transaction) -> Tenant:
        version = bump(t)  # before the row is read, so that two changes come one after the other
        row = t.one(f"SELECT {TENANT_COLUMNS} FROM gateway_tenants WHERE name = ?", name)
        tenant = replace(change(tenant_of(row) if row else Tenant(name)), name=name)
        t.execute(
            f"INSERT INTO gateway_tenants (version, {TENANT_COLUMNS}) VALUES (?, ?, ?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET limits = excluded.limits, class = excluded.class,"
            " shares_cache = excluded.shares_cache, version = excluded.version",
            *(version, name, _limits_text(tenant.limits), tenant.priority_class, int(tenant.shares_cache)),
        )
        return tenant

    return work


def set_tenant(tenant: Tenant) -> Work[Tenant]:
    """Replace the settings of a tenant."""
    return change_tenant(tenant.name, lambda _: tenant)


def bump(t: Transaction) -> int:
    """Return the version of a change; a second change waits until this transaction has ended."""
    row = t.one("UPDATE gateway_version SET version = version + 1 WHERE id = 1 RETURNING version")
    assert row is not None
    return int(row[0])


# --- questions --------------------------------------------------------------------------------------------


def find_all(tenant: str | None = None) -> Work[list[Key]]:
    """List the keys, oldest first."""
    where, values = ("WHERE tenant = ?", (tenant,)) if tenant is not None else ("", ())
    sql = f"SELECT {KEY_COLUMNS} FROM gateway_keys {where} ORDER BY created, id"
    return lambda t: [key_of(row) for row in t.all(sql, *values)]


def find_tenants() -> Work[list[Tenant]]:
    """List the tenants with settings of their own."""
    sql = f"SELECT {TENANT_COLUMNS} FROM gateway_tenants ORDER BY name"
    return lambda t: [tenant_of(row) for row in t.all(sql)]


def find_one(word: str) -> Work[Key]:
    """Find a key by its id, its prefix with or without `dv-`, or its name if no other key has it."""

    def work(t: Transaction) -> Key:
        prefix = word if word.startswith("dv-") else f"dv-{word}"
        rows = t.all(
            f"SELECT {KEY_COLUMNS} FROM gateway_keys WHERE id = ? OR prefix = ? OR name = ? ORDER BY created",
            *(word, prefix[: len("dv-") + PREFIX_CHARACTERS], word),
        )
        found = [key_of(row) for row in rows]
        exact = [key for key in found if word in (key.id, key.prefix)]
        if not found:
            raise ConfigError(f"there is no key {shown(word)!r}; 'dynamo-vllm keys list' shows all")
        if len(exact or found) > 1:
            prefixes = ", ".join(key.prefix for key in (exact or found)[:5])
            raise ConfigError(
                f"{len(exact or found)} keys are named {word!r}; give the prefix of one: {prefixes}"
            )
        return (exact or found)[0]

    return work


def shown(word: str) -> str:
    """Return a word for messages, which may be a whole secret by mistake."""
    return word if len(word) <= 2 * PREFIX_CHARACTERS else f"{word[: len('dv-') + PREFIX_CHARACTERS]}…"


def names_of(ids: set[str]) -> Work[dict[str, tuple[str, str]]]:
    """Find the prefix and name of keys by id."""
    sql = "SELECT id, prefix, name FROM gateway_keys WHERE id IN"
    return lambda t: {str(row[0]): (str(row[1]), str(row[2])) for row in in_list(t, sql, ids)}


def get(t: Transaction, key_id: str) -> Key:
    row = t.one(f"SELECT {KEY_COLUMNS} FROM gateway_keys WHERE id = ?", key_id)
    if row is None:
        raise ConfigError(f"there is no key {key_id!r}; 'dynamo-vllm keys list' shows all")
    return key_of(row)


# --- rows -------------------------------------------------------------------------------------------------

KEY_COLUMNS = "id, prefix, name, tenant, created, expires, revoked, scopes, limits, class"
TENANT_COLUMNS = "name, limits, class, shares_cache"


def key_of(row: Row) -> Key:
    key_id, prefix, name, tenant, created, expires, revoked, scopes, limits, priority_class = row
    return Key(
        *(key_id, prefix, name, tenant, created, expires, revoked),
        scopes=_scopes_of(scopes),
        limits=_limits_of(limits),
        priority_class=priority_class or None,
    )


def tenant_of(row: Row) -> Tenant:
    name, limits, priority_class, shares_cache = row
    return Tenant(name, _limits_of(limits), priority_class, bool(shares_cache))


def _key_values(key: Key) -> tuple[object, ...]:
    return (
        *(key.id, key.prefix, key.name, key.tenant, key.created, key.expires, key.revoked),
        *(_scopes_text(key.scopes), _limits_text(key.limits), key.priority_class or ""),
    )


# Most keys have the same ones: with 100,000 keys the objects are shared and the text is read once.
@functools.lru_cache(4096)
def _scopes_of(text: str) -> Scopes:
    return msgspec.json.decode(text, type=Scopes)


@functools.lru_cache(4096)
def _limits_of(text: str) -> Limits:
    return msgspec.json.decode(text, type=Limits)


def _scopes_text(scopes: Scopes) -> str:
    return msgspec.json.encode(scopes).decode()


def _limits_text(limits: Limits) -> str:
    return msgspec.json.encode(limits).decode()


def _time(now: float | None) -> float:
    return time.time() if now is None else now
