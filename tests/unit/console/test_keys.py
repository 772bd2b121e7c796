"""Keys and usage of the gateway on the page."""

from __future__ import annotations

import time
from typing import Any

from dynamo_vllm.console.keys import KeyVerbs
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.ledger import Ledger
from harness.gateway_store import record
from harness.refusals import refused

NO_LIMITS = {
    **{"requests_per_minute": None, "tokens_per_minute": None},
    **{"tokens_per_day": None, "requests_at_a_time": None},
}


async def done(verbs: KeyVerbs, verb: str, **body: Any) -> dict[str, Any]:
    found = await verbs.perform(verb, body)
    assert found["ok"], found["said"]
    reply: dict[str, Any] = found["reply"]
    return reply


async def test_secret_is_shown_once_and_the_key_listed_without_it(database: Database) -> None:
    verbs = KeyVerbs(database)
    limits = {"tokens_per_day": 5, "requests_at_a_time": 2}
    created = await done(verbs, "keys_create", name="alice", tenant="acme", **limits)
    assert created["secret"].startswith("dv-")
    listed = await done(verbs, "keys_list")
    (only,) = listed["keys"]
    about = {"key": created["key"], "name": "alice", "tenant": "acme", "state": "active", "expires": None}
    assert only == {**about, "created": only["created"], **NO_LIMITS, **limits}
    assert created["secret"] not in str(listed)


async def test_revoked_key_is_said_to_be(database: Database) -> None:
    verbs = KeyVerbs(database)
    made = await done(verbs, "keys_create", name="alice")
    assert (await done(verbs, "keys_revoke", key=made["key"]))["state"] == "revoked"
    refused = await verbs.perform("keys_revoke", {"key": "dv-none"})
    assert refused["ok"] is False and "there is no key" in refused["said"]


async def test_limits_of_a_tenant_change_in_parts_and_zero_removes_one(database: Database) -> None:
    verbs = KeyVerbs(database)
    await done(verbs, "keys_limits", tenant="acme", tokens_per_minute=7, requests_at_a_time=3)
    found = await done(verbs, "keys_limits", tenant="acme", tokens_per_minute=0)
    assert found == {"tenant": "acme", "class": "normal", **NO_LIMITS, "requests_at_a_time": 3}
    assert (await done(verbs, "keys_list"))["tenants"] == [found]


async def test_usage_is_summed_by_what_was_asked_for(database: Database) -> None:
    verbs = KeyVerbs(database)
    key, _ = await database.run(keys.create("alice", tenant="acme"))
    await Ledger(database).settle([record("r1", key_id=key.id, at=time.time())])
    (by_tenant,) = (await done(verbs, "usage", by="tenant"))["rows"]
    assert by_tenant["name"] == "acme" and by_tenant["requests"] == 1 and by_tenant["output_tokens"] > 0
    (by_key,) = (await done(verbs, "usage", by="key"))["rows"]
    assert by_key["name"] == f"{key.prefix} alice"
    (by_day,) = (await done(verbs, "usage", by="day"))["rows"]
    assert by_day["name"] == time.strftime("%Y-%m-%d", time.gmtime())


async def test_bodies_that_are_something_else_are_refused_and_a_bad_name_of_a_tenant_is_said(
    database: Database,
) -> None:
    bodies: tuple[tuple[str, dict[str, Any]], ...] = (
        ("keys_create", {}),
        ("keys_create", {"name": " "}),
        ("keys_create", {"name": "x" * 101}),
        ("keys_create", {"name": "a", "tokens_per_day": -1}),
        ("keys_create", {"name": "a", "admin": True}),
        ("keys_revoke", {"key": 1}),
        ("usage", {"by": "prompt"}),
    )
    for verb, body in bodies:
        with refused(400):
            await KeyVerbs(database).perform(verb, body)
    found = await KeyVerbs(database).perform("keys_create", {"name": "a", "tenant": "a b"})
    assert found["ok"] is False and "is not a name of a tenant" in found["said"]
