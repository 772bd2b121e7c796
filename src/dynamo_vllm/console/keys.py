"""Does with API keys and usage of the gateway what `keys` and `usage` do, in the gateway's own database."""

from __future__ import annotations

import dataclasses
import datetime
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from dynamo_vllm.config.rules.gateway.keys import check_tenant
from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.gateway.store import keys, usage

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from dynamo_vllm.gateway.database import Database
    from dynamo_vllm.gateway.store.keys import Key, Limits, Tenant

    Reply = dict[str, Any]

MOST_NAME_CHARACTERS = 100
USAGE_DAYS = 30
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)] | None
_AT_A_TIME = "requests_at_a_time"


class _Limited(msgspec.Struct, forbid_unknown_fields=True):
    """Limits; None leaves one as it is, 0 removes it."""

    requests_per_minute: Count = None
    tokens_per_minute: Count = None
    tokens_per_day: Count = None
    requests_at_a_time: Count = None


class Create(_Limited, forbid_unknown_fields=True, kw_only=True):
    name: str
    tenant: str = keys.DEFAULT_TENANT


class Revoke(msgspec.Struct, forbid_unknown_fields=True):
    key: str


class ChangeTenant(_Limited, forbid_unknown_fields=True, kw_only=True):
    tenant: str


class SumUp(msgspec.Struct, forbid_unknown_fields=True):
    by: Literal["tenant", "key", "model", "day"] = "tenant"


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class KeyVerbs:
    """The verbs of a gateway."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._verbs: dict[str, tuple[type[Any], Callable[[Any], Awaitable[tuple[str, Reply]]]]] = {
            "keys_list": (Nothing, self._list),
            "keys_create": (Create, self._create),
            "keys_revoke": (Revoke, self._revoke),
            "keys_limits": (ChangeTenant, self._change_tenant),
            "usage": (SumUp, self._sum_up),
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._verbs)

    async def perform(self, verb: str, body: dict[str, Any]) -> dict[str, Any]:
        shape, run = self._verbs[verb]
        try:
            said, reply = await run(msgspec.convert(body, shape))
        except msgspec.ValidationError as exc:
            raise ConsoleError(400, str(exc)) from None
        except DynamoVllmError as exc:
            return {"worker": None, "ok": False, "said": str(exc), "reply": {}}
        return {"worker": None, "ok": True, "said": said, "reply": reply}

    async def _list(self, _: Nothing) -> tuple[str, Reply]:
        now = time.time()
        found = await self._database.run(keys.find_all())
        tenants = await self._database.run(keys.find_tenants())
        reply = {"keys": [_key(key, now) for key in found], "tenants": [_tenant(one) for one in tenants]}
        return f"{len(found)} keys", reply

    async def _create(self, asked: Create) -> tuple[str, Reply]:
        name = asked.name.strip()
        if not name or len(name) > MOST_NAME_CHARACTERS or not name.isprintable():
            raise ConsoleError(
                400, f"name must be 1 to {MOST_NAME_CHARACTERS} characters that can be printed"
            )
        check_tenant("tenant", asked.tenant)
        made = keys.create(name, tenant=asked.tenant, limits=_changed(keys.NO_LIMITS, asked))
        key, secret = await self._database.run(made)
        said = f"key {key.prefix} ({key.name}); keep the secret now, it is not shown again"
        return said, {"key": key.prefix, "secret": secret}

    async def _revoke(self, asked: Revoke) -> tuple[str, Reply]:
        key = await self._database.run(keys.find_one(asked.key))
        ended = await self._database.run(keys.revoke(key.id))
        return f"key {ended.prefix} ({ended.name}) is revoked", _key(ended, time.time())

    async def _change_tenant(self, asked: ChangeTenant) -> tuple[str, Reply]:
        check_tenant("tenant", asked.tenant)

        def changed(before: Tenant) -> Tenant:
            return dataclasses.replace(before, limits=_changed(before.limits, asked))

        found = await self._database.run(keys.change_tenant(asked.tenant, changed))
        return f"limits of {found.name} are set", _tenant(found)

    async def _sum_up(self, asked: SumUp) -> tuple[str, Reply]:
        now = time.time()
        found = await self._database.run(usage.usage(now - USAGE_DAYS * 86400, now, (asked.by,)))
        names = await self._database.run(keys.names_of({one.key for one in found if one.key is not None}))
        rows = []
        for one in found:
            requests, prompt, cached, completion = one.sums
            sums = {"prompt_tokens": prompt, "cached_tokens": cached, "output_tokens": completion}
            rows.append({"name": _name(one, asked.by, names), "requests": requests, **sums})
        return f"the last {USAGE_DAYS} days", {"rows": rows}


def _name(one: usage.Usage, by: str, names: dict[str, tuple[str, str]]) -> str:
    if by == "day" and one.day is not None:
        return (datetime.date(1970, 1, 1) + datetime.timedelta(one.day)).isoformat()
    if by == "key" and one.key is not None:
        return " ".join(names.get(one.key, (one.key, ""))).strip()
    return str(getattr(one, by))


def _changed(before: Limits, asked: _Limited) -> Limits:
    """Return the limits with those that were given; 0 is none."""
    given = msgspec.structs.asdict(asked)
    given["concurrent"] = given.pop(_AT_A_TIME)
    fields = {field.name for field in dataclasses.fields(before)}
    named = {name: value for name, value in given.items() if name in fields and value is not None}
    return dataclasses.replace(before, **{name: value or None for name, value in named.items()})


def _limits(limits: Limits) -> Reply:
    found = dataclasses.asdict(limits)
    at_a_time = found.pop("concurrent")
    return {**found, _AT_A_TIME: at_a_time}


def _key(key: Key, now: float) -> Reply:
    about = {"key": key.prefix, "name": key.name, "tenant": key.tenant, "state": key.state(now)}
    return {**about, "created": key.created, "expires": key.expires, **_limits(key.limits)}


def _tenant(tenant: Tenant) -> Reply:
    return {"tenant": tenant.name, "class": tenant.priority_class, **_limits(tenant.limits)}
