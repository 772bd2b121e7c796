"""Rules for the options of `keys` and `usage`."""

from __future__ import annotations

import re
import time

from dynamo_vllm.config import durations
from dynamo_vllm.config.options.gateway.keys import (
    CreateKeyOptions,
    DatabaseOptions,
    LimitOptions,
    ListKeysOptions,
    RotateKeyOptions,
    TenantOptions,
)
from dynamo_vllm.config.options.gateway.usage import UsageOptions
from dynamo_vllm.errors import ConfigError

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_LIMITS = ("requests_per_minute", "tokens_per_minute", "tokens_per_day", "concurrent")


def limits_are_counts(o: DatabaseOptions) -> None:
    if not isinstance(o, LimitOptions):
        return
    for name in _LIMITS:
        value: int | None = getattr(o, name)
        flag = "--" + name.replace("_", "-")
        if isinstance(o, TenantOptions):
            if value is not None and value < 0:
                raise ConfigError(f"{flag} {value} must be 1 or more, or 0 for no limit")
        elif value is not None and value < 1:
            raise ConfigError(f"{flag} {value} must be 1 or more; leave it out for no limit")


def tenant_is_a_name(o: DatabaseOptions) -> None:
    if isinstance(o, CreateKeyOptions | ListKeysOptions) and o.tenant is not None:
        check_tenant("--tenant", o.tenant)


def check_tenant(source: str, name: str) -> None:
    """Names of tenants are in headers and metrics."""
    if _TENANT.fullmatch(name) is None:
        raise ConfigError(
            f"{source} {name!r} is not a name of a tenant; use up to 64 letters, digits, '.', '_' and '-'"
        )


def expiry_is_a_duration(o: DatabaseOptions) -> None:
    if (
        isinstance(o, CreateKeyOptions)
        and o.expires is not None
        and not durations.duration("--expires", o.expires) > 0
    ):
        raise ConfigError(f"--expires {o.expires} is over already; leave it out for a key that does not end")


def grace_is_a_duration(o: DatabaseOptions) -> None:
    if isinstance(o, RotateKeyOptions) and o.grace is not None:
        durations.duration("--grace", o.grace)


def scopes_have_names(o: DatabaseOptions) -> None:
    if isinstance(o, CreateKeyOptions):
        for flag, values in (("--model", o.model), ("--endpoint", o.endpoint)):
            if not all(value.strip() for value in values):
                raise ConfigError(f"{flag} is empty; leave it out to allow all")


def days_are_in_order(o: DatabaseOptions) -> None:
    if not isinstance(o, UsageOptions):
        return
    now = time.time()
    since = durations.moment("--since", o.since, now)
    if o.until is not None and durations.moment("--until", o.until, now) <= since:
        raise ConfigError(f"--until {o.until} is not after --since {o.since}; exchange them")


def one_format(o: DatabaseOptions) -> None:
    if isinstance(o, UsageOptions) and o.csv and o.json:
        raise ConfigError("--csv and --json cannot be combined; give one of them")


def database_has_an_address(o: DatabaseOptions) -> None:
    if o.database is not None and not re.match(r"(sqlite:///.|postgres(ql)?://.)", o.database):
        # It is not repeated here: it may contain a password.
        raise ConfigError("--database is not an address; use sqlite:///FILE or postgresql://USER@HOST/NAME")


RULES = (
    database_has_an_address,
    limits_are_counts,
    tenant_is_a_name,
    expiry_is_a_duration,
    grace_is_a_duration,
    scopes_have_names,
    days_are_in_order,
    one_format,
)
