"""Runs `dynamo-vllm keys`: creates, lists and ends API keys, and sets what tenants may use."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.config import build, checks, durations
from dynamo_vllm.config.options.gateway.keys import (
    CreateKeyOptions,
    DatabaseOptions,
    LimitOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
)
from dynamo_vllm.config.rules.gateway.keys import check_tenant
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dynamo_vllm.gateway.database import Database
    from dynamo_vllm.gateway.store.keys import Key, Limits, Scopes, Tenant

PROG = "dynamo-vllm keys"
LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "tokens_per_day": "tokens/day",
    "concurrent": "at once",
}
MOST_NAME_CHARACTERS = 100
TENANT_HEAD = ("TENANT", "CLASS", "LIMITS", "PREFIX CACHE")


def create(database: Database, options: CreateKeyOptions, words: Sequence[str]) -> None:
    from dynamo_vllm.gateway.store import keys

    now = time.time()
    expires = None if options.expires is None else now + durations.duration("--expires", options.expires)
    made = keys.create(
        words[0],
        tenant=options.tenant,
        expires=expires,
        scopes=keys.Scopes(options.model, options.endpoint, options.admin),
        limits=given_limits(keys.NO_LIMITS, options),
        priority_class=options.priority_class,
        now=now,
    )
    show_secret(options, *database.run_now(made))


def list_all(database: Database, options: ListKeysOptions, words: Sequence[str]) -> None:
    from dynamo_vllm.cli.tables import table
    from dynamo_vllm.gateway.store import keys

    now = time.time()
    found = database.run_now(keys.find_all(options.tenant))
    tenants = [one for one in database.run_now(keys.find_tenants()) if options.tenant in (None, one.name)]
    if options.json:
        as_json = {
            "keys": [key_json(key, now) for key in found],
            "tenants": [dataclasses.asdict(tenant) for tenant in tenants],
        }
        print(json.dumps(as_json, indent=2))
        return
    if not found:
        print("no keys; 'dynamo-vllm keys create NAME' creates one")
    else:
        head = ("KEY", "NAME", "TENANT", "CLASS", "LIMITS", "SCOPES", "EXPIRES", "STATE")
        print(table(head, [key_row(key, now) for key in found]))
    if tenants:
        print()
        print(table(TENANT_HEAD, [tenant_row(tenant) for tenant in tenants]))


def revoke(database: Database, options: DatabaseOptions, words: Sequence[str]) -> None:
    from dynamo_vllm.gateway.store import keys

    key = database.run_now(keys.revoke(database.run_now(keys.find_one(words[0])).id))
    if options.json:
        print(json.dumps(key_json(key, time.time()), indent=2))
    else:
        print(f"key {key.prefix} ({key.name}) is revoked; gateways refuse it within a second")


def rotate(database: Database, options: RotateKeyOptions, words: Sequence[str]) -> None:
    from dynamo_vllm.gateway.store import keys

    seconds = 0.0 if options.grace is None else durations.duration("--grace", options.grace)
    key = database.run_now(keys.find_one(words[0]))
    show_secret(options, *database.run_now(keys.rotate(key.id, grace_seconds=seconds)))


def tenant(database: Database, options: TenantOptions, words: Sequence[str]) -> None:
    from dynamo_vllm.cli.tables import table
    from dynamo_vllm.gateway.store import keys

    def changed(before: Tenant) -> Tenant:
        return dataclasses.replace(
            before,
            limits=given_limits(before.limits, options),
            priority_class=options.priority_class or before.priority_class,
            shares_cache=before.shares_cache if options.shares_cache is None else options.shares_cache,
        )

    check_tenant("NAME", words[0])
    found = database.run_now(keys.change_tenant(words[0], changed))
    if options.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print(table(TENANT_HEAD, [tenant_row(found)]))


@dataclass(frozen=True, slots=True)
class Command:
    """One command and its arguments."""

    about: str
    run: Callable[[Database, Any, Sequence[str]], None]
    options: type[DatabaseOptions]
    words: tuple[str, ...] = ()


COMMANDS: dict[str, Command] = {
    "create": Command(
        "Create an API key and print its secret, which is not shown again.",
        create,
        CreateKeyOptions,
        ("NAME",),
    ),
    "list": Command("Show keys and tenants, never a secret.", list_all, ListKeysOptions),
    "revoke": Command(
        "End a key for good. KEY is its prefix, its id, or its name if no other key has it.",
        revoke,
        DatabaseOptions,
        ("KEY",),
    ),
    "rotate": Command(
        "Give a key another secret. Its limits, scopes and usage stay.", rotate, RotateKeyOptions, ("KEY",)
    ),
    "tenant": Command(
        "Set what the keys of a tenant share. Only what is given changes; 0 removes a limit.",
        tenant,
        TenantOptions,
        ("NAME",),
    ),
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0 if argv else 2
    environment = build.environment()
    command, options, words = understand(argv, environment)
    database = open_database(options, environment)
    try:
        command.run(database, options, words)
    finally:
        database.close()
    return 0


def usage() -> str:
    lines = [f"usage: {PROG} {'|'.join(COMMANDS)} [OPTIONS]", ""]
    for name, command in COMMANDS.items():
        lines.append(f"  {' '.join((name, *command.words)):<12} {command.about.split('. ')[0].rstrip('.')}")
    return "\n".join([*lines, "", f"  {PROG} create --help  its options"])


def understand(
    argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[Command, DatabaseOptions, list[str]]:
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(f"keys: {name!r} is unknown; choose one of {', '.join(COMMANDS)}")
    command = COMMANDS[name]
    parser = build.parser(command.options, f"{PROG} {name}", command.about, own_first=True)
    wanted = " ".join((PROG, name, *command.words))
    parser.usage = f"{wanted} [OPTIONS]"
    given, words = parser.parse_known_args(rest)
    unknown = next((word for word in words if word.startswith("-")), None)
    if unknown is not None:
        raise ConfigError(f"{unknown} is not an option of keys {name}; see '{PROG} {name} --help'")
    if len(words) > len(command.words):
        raise ConfigError(f"{words[len(command.words)]!r} is one argument too many: {wanted}")
    if len(words) < len(command.words) or not all(word.strip() for word in words):
        raise ConfigError(f"{command.words[0]} is missing: {wanted}")
    if command.run is create and (len(words[0]) > MOST_NAME_CHARACTERS or not words[0].isprintable()):
        raise ConfigError(f"NAME must be up to {MOST_NAME_CHARACTERS} characters that can be printed")
    options = build.from_values(command.options, vars(given), environment)
    checks.check_keys(options)
    return command, options, words


def open_database(options: DatabaseOptions, environment: Mapping[str, str]) -> Database:
    from dynamo_vllm.gateway import database, schema

    return database.Database(options.database or database.default_url(environment), schema.ALL)


# --- words ------------------------------------------------------------------------------------------------


def given_limits(before: Limits, options: LimitOptions) -> Limits:
    """Return the limits with those that were given; 0 is none."""
    given = {name: getattr(options, name) for name in LIMITS}
    return dataclasses.replace(
        before, **{name: value or None for name, value in given.items() if value is not None}
    )


def show_secret(options: DatabaseOptions, key: Key, secret: str) -> None:
    """Print the secret alone on standard output, so that a script can take it."""
    if options.json:
        print(json.dumps({**key_json(key, time.time()), "secret": secret}, indent=2))
        return
    print(secret)
    print(f"key {key.prefix} ({key.name}); keep the secret now, it is not shown again", file=sys.stderr)


def key_json(key: Key, now: float) -> dict[str, Any]:
    return {**dataclasses.asdict(key), "state": key.state(now)}


def key_row(key: Key, now: float) -> Sequence[object]:
    return (
        *(key.prefix, key.name, key.tenant, key.priority_class or "-"),
        *(limits_text(key.limits), scopes_text(key.scopes), durations.date(key.expires), key.state(now)),
    )


def tenant_row(tenant: Tenant) -> Sequence[object]:
    cache = "shared" if tenant.shares_cache else "its own"
    return tenant.name, tenant.priority_class, limits_text(tenant.limits), cache


def limits_text(limits: Limits) -> str:
    found = [f"{getattr(limits, name)} {unit}" for name, unit in LIMITS.items() if getattr(limits, name)]
    return ", ".join(found) or "none"


def scopes_text(scopes: Scopes) -> str:
    named = " ".join((*scopes.models, *scopes.endpoints)) or "all"
    return f"{named} +admin" if scopes.admin else named
