"""Keys and tenants: what is allowed, how a key is named, many of them, and an older copy of the database."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynamo_vllm.errors import ConfigError
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.key_ring import KeyRing, NoKey
from dynamo_vllm.gateway.store.keys import ANYBODY, Key, Limits, Scopes, Tenant
from harness.gateway_store import NOON


def test_endpoints_are_beginnings_of_paths_and_models_whole_names() -> None:
    assert Scopes().allow_path("/anything")
    assert Scopes(endpoints=("chat",)).allow_path("/v1/chat/completions")
    assert not Scopes(endpoints=("chat",)).allow_path("/v1/completions")
    assert Scopes(endpoints=("/v1/files/",)).allow_path("/v1/files/f-1")
    assert not Scopes(endpoints=("files",)).allow_path("/v1/files-old")
    assert Scopes().allow_model("m") and Scopes(models=("m",)).allow_model("m")
    assert not Scopes(models=("m",)).allow_model("m2")


def test_key_without_a_class_has_its_tenants() -> None:
    key = Key("k", "p", "n")
    assert keys.class_of(key, Tenant(priority_class=keys.LOW)) == keys.LOW
    assert keys.class_of(replace(key, priority_class=keys.HIGH), Tenant()) == keys.HIGH


async def test_expired_key_is_refused_from_that_moment(database: Database) -> None:
    _, secret = await database.run(keys.create("k", expires=NOON))
    ring = KeyRing(database)
    await ring.refresh()
    assert isinstance(ring.find(secret, NOON - 1), Key)
    assert ring.find(secret, NOON) is NoKey.EXPIRED


async def test_fixed_keys_open_all_but_admin(database: Database) -> None:
    ring = KeyRing(database, ["first secret", "second secret"])
    key = ring.find("second secret")
    assert isinstance(key, Key)
    assert (key.id, key.tenant, key.limits, key.scopes.admin) == ("flag-2", "default", Limits(), False)
    assert ring.key("flag-1") is not None and ring.key("flag-3") is None
    assert "second secret" not in repr(key)


async def test_one_change_among_a_thousand_keys_is_read_alone(database: Database) -> None:
    made = [(Key(f"key-{n}", f"dv-{n}", "many"), keys.hash_of(f"secret {n}")) for n in range(1000)]
    await database.run(lambda t: keys.insert(t, made))
    ring = KeyRing(database)
    await ring.refresh()
    untouched = ring.find("secret 999")
    assert len(ring) == 1000
    await database.run(keys.revoke("key-500"))
    assert await ring.refresh()
    assert ring.find("secret 500") is NoKey.REVOKED
    assert ring.find("secret 999") is untouched


async def test_older_copy_of_the_database_is_read_anew(database: Database) -> None:
    ring = KeyRing(database)
    _, old = await database.run(keys.create("old"))
    _, new = await database.run(keys.create("new"))
    await ring.refresh()
    await database.run(lambda t: t.execute("DELETE FROM gateway_keys WHERE name = 'new'"))
    await database.run(lambda t: t.execute("UPDATE gateway_version SET version = 1"))
    await ring.refresh()
    assert isinstance(ring.find(old), Key) and ring.find(new) is NoKey.UNKNOWN


async def test_change_of_a_key_keeps_what_it_is(database: Database) -> None:
    key, secret = await database.run(keys.create("k", tenant="acme"))
    await database.run(keys.change_key(key.id, lambda k: replace(k, limits=Limits(concurrent=2), tenant="x")))
    ring = KeyRing(database)
    await ring.refresh()
    assert ring.find(secret) == replace(key, limits=Limits(concurrent=2))


async def test_key_is_named_by_id_prefix_or_name(database: Database) -> None:
    one, secret = await database.run(keys.create("one"))
    for word in (one.id, one.prefix, one.prefix.removeprefix("dv-"), "one", secret):
        assert await database.run(keys.find_one(word)) == one
    await database.run(keys.create("one"))
    ambiguous = f"2 keys are named 'one'; give the prefix of one: {one.prefix}, dv-"
    with pytest.raises(ConfigError, match=ambiguous):
        await database.run(keys.find_one("one"))
    with pytest.raises(ConfigError, match="there is no key 'dv-12345678…'") as refused:
        await database.run(keys.find_one("dv-12345678-" + "x" * 40))
    assert "xxx" not in str(refused.value)


async def test_ended_key_gets_no_new_secret(database: Database) -> None:
    key, _ = await database.run(keys.create("k"))
    await database.run(keys.revoke(key.id))
    assert (await database.run(keys.revoke(key.id))).revoked is not None
    with pytest.raises(ConfigError, match=f"key {key.prefix} is revoked; create another one"):
        await database.run(keys.rotate(key.id))
    with pytest.raises(ConfigError, match="there is no key 'key-none'"):
        await database.run(keys.revoke("key-none"))


async def test_keys_and_tenants_are_listed(database: Database) -> None:
    one, _ = await database.run(keys.create("one", tenant="a", now=1))
    two, _ = await database.run(keys.create("two", tenant="b", now=2))
    await database.run(keys.change_tenant("b", lambda t: replace(t, shares_cache=True)))
    assert await database.run(keys.find_all()) == [one, two]
    assert await database.run(keys.find_all("b")) == [two]
    assert await database.run(keys.find_tenants()) == [Tenant("b", shares_cache=True)]
    assert await database.run(keys.names_of({one.id, "x"})) == {one.id: (one.prefix, "one")}


def test_in_an_open_gateway_every_secret_is_anybodys(database: Database) -> None:
    ring = KeyRing(database, is_open=True)
    for secret in ("", "anything", "sk-some-other-key"):
        assert ring.find(secret) is ANYBODY
    assert ring.usable(ANYBODY.id) is ANYBODY and KeyRing(database).key(ANYBODY.id) is None
    assert ANYBODY.scopes.admin and ANYBODY.limits.are_none
