"""Logins: with the admin token, with an admin key of the gateway, and too many wrong ones."""

from __future__ import annotations

import asyncio

import pytest

from dynamo_vllm.console import sessions as module
from dynamo_vllm.console.replies import ConsoleError
from dynamo_vllm.console.sessions import GatewayKeys, Sessions
from dynamo_vllm.errors import DynamoVllmError
from dynamo_vllm.gateway.database import Database
from dynamo_vllm.gateway.store import keys
from dynamo_vllm.gateway.store.keys import Scopes

ADMIN = Scopes(admin=True)


async def refusal(sessions: Sessions, given: str, client: str = "") -> int | None:
    try:
        await sessions.open(given, client)
    except ConsoleError as exc:
        return exc.status
    return None


async def test_session_opens_with_the_token_and_ends() -> None:
    now = 0.0
    sessions = Sessions("token", clock=lambda: now)
    secret = await sessions.open("token")
    assert sessions.is_open(secret) and not sessions.is_open("x") and not sessions.is_open(None)
    sessions.close(secret)
    assert not sessions.is_open(secret)
    again = await sessions.open("token")
    now = module.SESSION_SECONDS + 1
    assert not sessions.is_open(again)


async def test_wrong_tokens_are_refused_and_too_many_wait() -> None:
    now = 0.0
    sessions = Sessions("token", clock=lambda: now)
    for _ in range(module.WRONG_TOKENS):
        assert await refusal(sessions, "tokem") == 401
    assert await refusal(sessions, "token") == 429
    now = module.WRONG_SECONDS
    for _ in range(3 * module.WRONG_TOKENS):  # right ones do not count
        assert await refusal(sessions, "token") is None


async def test_one_client_does_not_lock_out_another() -> None:
    sessions = Sessions("token")
    for number in range(module.WRONG_TOKENS):
        assert await refusal(sessions, "x", f"2001:db8::{number:x}") == 401  # the same household
    assert await refusal(sessions, "token", "2001:db8::ffff") == 429
    assert await refusal(sessions, "token", "10.0.0.1") is None
    for number in range(module.MOST_WRONG_TOKENS - module.WRONG_TOKENS):
        assert await refusal(sessions, "x", f"10.1.0.{number}") == 401
    assert await refusal(sessions, "token", "10.1.0.1") == 429  # all of them together have a limit too
    assert await refusal(sessions, "token", "10.0.0.1") is None  # who was never wrong has a try
    assert await refusal(sessions, "x", "10.0.0.1") == 401
    assert await refusal(sessions, "token", "10.0.0.1") == 429


def test_addresses_that_one_client_has_are_counted_together() -> None:
    network_of = module.network_of
    assert network_of("127.0.0.1") == network_of("127.9.9.9") == network_of("::ffff:127.0.0.1")
    assert network_of("2001:db8::1") == network_of("2001:db8::2")
    assert network_of("::ffff:192.0.2.1") == network_of("192.0.2.1") != network_of("::ffff:192.0.2.2")


def test_clients_of_this_machine_have_no_address() -> None:
    assert all(map(module.is_this_machine, ("127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1")))
    assert not module.is_this_machine("10.0.0.1")


async def test_login_that_was_ended_early_does_not_count_as_wrong() -> None:
    class Hanging(NoDatabase):
        async def refresh(self) -> None:
            await asyncio.Event().wait()

    sessions = Sessions("token", Hanging())
    for _ in range(2 * module.WRONG_TOKENS):
        task = asyncio.ensure_future(sessions.open("a key"))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await refusal(sessions, "token") is None


class NoDatabase:
    """Keys of a gateway whose database is away."""

    async def refresh(self) -> None:
        raise DynamoVllmError("it does not answer")

    def is_good(self, digest: bytes) -> bool:
        return False


async def test_key_that_could_not_be_looked_up_does_not_count_as_wrong() -> None:
    sessions = Sessions("token", NoDatabase())
    for _ in range(2 * module.WRONG_TOKENS):
        assert await refusal(sessions, "a key") == 503
    assert await refusal(sessions, "token") is None


async def test_sessions_have_a_bound() -> None:
    sessions = Sessions("token")
    made = [await sessions.open("token") for _ in range(module.MOST_SESSIONS + 1)]
    assert not sessions.is_open(made[0]) and sessions.is_open(made[-1])


async def test_only_a_key_with_admin_logs_in(database: Database) -> None:
    sessions = Sessions(None, GatewayKeys(database))
    assert await refusal(sessions, "") == 401
    _, of_tenant = await database.run(keys.create("alice"))
    _, of_admin = await database.run(keys.create("ops", scopes=ADMIN))
    assert await refusal(sessions, of_tenant) == 401
    assert sessions.is_open(await sessions.open(of_admin))
    assert await refusal(sessions, of_admin[:-1]) == 401


async def test_admin_key_for_some_endpoints_logs_in_only_if_this_is_one(database: Database) -> None:
    sessions = Sessions(None, GatewayKeys(database))
    for endpoint, status in {"/metrics": 401, "/console": None}.items():
        scopes = Scopes(admin=True, endpoints=(endpoint,))
        _, secret = await database.run(keys.create(endpoint, scopes=scopes))
        assert await refusal(sessions, secret) == status


async def test_token_logs_in_beside_keys(database: Database) -> None:
    sessions = Sessions("token", GatewayKeys(database))
    assert sessions.is_open(await sessions.open("token"))
    assert sessions.words == "the value of --admin-token, or a key of the gateway with --admin"


@pytest.mark.parametrize("ending", ["revoked", "rotated", "expired"])
async def test_session_ends_with_its_key(
    database: Database, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = GatewayKeys(database)
    sessions = Sessions(None, found)
    expires = 4e9 if ending == "expired" else None
    key, secret = await database.run(keys.create("ops", scopes=ADMIN, expires=expires))
    session = await sessions.open(secret)
    assert sessions.is_open(session)
    if ending == "expired":
        monkeypatch.setattr("dynamo_vllm.gateway.store.key_ring.time.time", lambda: 4e9)
    elif ending == "revoked":
        await database.run(keys.revoke(key.id))
    else:
        await database.run(keys.rotate(key.id))
    await found.refresh()
    assert not sessions.is_open(session)
    assert await refusal(sessions, secret) == 401


async def test_keys_are_read_again_by_themselves(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REFRESH_SECONDS", 0.0)
    found = GatewayKeys(database)
    sessions = Sessions(None, found)
    key, secret = await database.run(keys.create("ops", scopes=ADMIN))
    session = await sessions.open(secret)
    running = asyncio.create_task(found.run())
    await database.run(keys.revoke(key.id))
    while sessions.is_open(session):
        await asyncio.sleep(0)
    running.cancel()
