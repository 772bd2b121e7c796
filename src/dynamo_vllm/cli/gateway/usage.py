"""Runs `dynamo-vllm usage`: prints who used how many tokens through the gateway."""

from __future__ import annotations

import csv
import datetime
import json
import sys
import time
from typing import TYPE_CHECKING

from dynamo_vllm.cli.gateway.keys import open_database
from dynamo_vllm.config import build, checks, durations
from dynamo_vllm.config.options.gateway.usage import GROUPS, UsageOptions
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.gateway.store.usage import Usage

PROG = "dynamo-vllm usage"
DESCRIPTION = "Show the tokens that were used through the gateway, from its database. Days are in UTC."
TOKENS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
Names = dict[str, tuple[str, str]]


def main(argv: Sequence[str]) -> int:
    from dynamo_vllm.gateway.store import keys, usage

    environment = build.environment()
    options = understand(argv, environment)
    now = time.time()
    since = durations.moment("--since", options.since, now)
    until = now if options.until is None else durations.moment("--until", options.until, now)
    database = open_database(options, environment)
    try:
        found = database.run_now(usage.usage(since, until, options.by))
        names = database.run_now(keys.names_of({one.key for one in found if one.key is not None}))
    finally:
        database.close()
    groups = [name for name in GROUPS if name in options.by]
    report(options, groups, [line(one, groups, names) for one in found])
    return 0


def understand(argv: Sequence[str], environment: Mapping[str, str]) -> UsageOptions:
    options, rest = build.parse(UsageOptions, argv, environment, PROG, DESCRIPTION)
    if rest:
        raise ConfigError(f"{rest[0]} is not an option of usage; see '{PROG} --help'")
    checks.check_keys(options)
    return options


def line(one: Usage, groups: Sequence[str], names: Names) -> dict[str, object]:
    """Return one line by column. A key is its prefix; the name beside it is for people."""
    found: dict[str, object] = {}
    for group in groups:
        if group == "day" and one.day is not None:
            found["day"] = (datetime.date(1970, 1, 1) + datetime.timedelta(one.day)).isoformat()
        elif group == "key" and one.key is not None:
            prefix, name = names.get(one.key, (one.key, ""))
            found |= {"key": prefix, "key_id": one.key, "key_name": name}
        else:
            found[group] = getattr(one, group)
    return found | dict(zip(TOKENS, one.sums, strict=True))


def report(options: UsageOptions, groups: Sequence[str], lines: Sequence[dict[str, object]]) -> None:
    from dynamo_vllm.cli.tables import table

    columns = [
        column for group in groups for column in (group, *(("key_id", "key_name") if group == "key" else ()))
    ]
    if options.json:
        print(json.dumps({"usage": lines}, indent=2))
    elif options.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*columns, *TOKENS])
        writer.writerows([one[name] for name in (*columns, *TOKENS)] for one in lines)
    elif not lines:
        print(f"nothing was used since {options.since}")
    else:
        shown = [name for name in columns if name != "key_id"]
        head = [name.replace("_", " ").upper() for name in (*shown, *TOKENS)]
        print(table(head, [[one[name] for name in (*shown, *TOKENS)] for one in lines]))
