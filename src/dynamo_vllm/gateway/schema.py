"""The tables of the gateway, in SQL that SQLite and PostgreSQL understand.

Times are DOUBLE PRECISION seconds since 1970. A statement may run again in every start, so each says IF NOT
EXISTS. A later version adds tables or indexes; it never changes one that exists.
"""

from __future__ import annotations

from dynamo_vllm.gateway.batches.tables import TABLES as BATCHES
from dynamo_vllm.gateway.responses.tables import TABLES as RESPONSES

KEYS = (
    """CREATE TABLE IF NOT EXISTS gateway_keys (
        id TEXT PRIMARY KEY,
        hash TEXT NOT NULL UNIQUE,
        prefix TEXT NOT NULL,
        name TEXT NOT NULL,
        tenant TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION,
        revoked DOUBLE PRECISION,
        scopes TEXT NOT NULL,
        limits TEXT NOT NULL,
        class TEXT NOT NULL,
        version BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_keys_version ON gateway_keys (version)",
    # Secrets that were replaced; each is valid until it ends.
    """CREATE TABLE IF NOT EXISTS gateway_old_secrets (
        hash TEXT PRIMARY KEY,
        key TEXT NOT NULL,
        ends DOUBLE PRECISION NOT NULL,
        version BIGINT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_old_secrets_version ON gateway_old_secrets (version)",
    """CREATE TABLE IF NOT EXISTS gateway_tenants (
        name TEXT PRIMARY KEY,
        limits TEXT NOT NULL,
        class TEXT NOT NULL,
        shares_cache INTEGER NOT NULL,
        version BIGINT NOT NULL
    )""",
    # One row that changes with the tables above: gateways ask for it alone, then for rows with a higher
    # version.
    """CREATE TABLE IF NOT EXISTS gateway_version (
        id INTEGER PRIMARY KEY,
        version BIGINT NOT NULL
    )""",
    "INSERT INTO gateway_version (id, version) VALUES (1, 0) ON CONFLICT (id) DO NOTHING",
)
LIMITS = (
    # One row for each key or tenant with limits; `requests` and `tokens` are what is taken out of the
    # buckets.
    """CREATE TABLE IF NOT EXISTS gateway_counters (
        subject TEXT PRIMARY KEY,
        requests DOUBLE PRECISION NOT NULL,
        tokens DOUBLE PRECISION NOT NULL,
        updated DOUBLE PRECISION NOT NULL,
        day INTEGER NOT NULL,
        day_tokens BIGINT NOT NULL,
        running BIGINT NOT NULL
    )""",
    # `key` and `tenant` are empty where these have no limits. `charged` and `is_running` are what the
    # counters contain of the request, so that a change is the difference to it.
    """CREATE TABLE IF NOT EXISTS gateway_reservations (
        request_id TEXT PRIMARY KEY,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        gateway TEXT NOT NULL,
        tokens BIGINT NOT NULL,
        parts INTEGER NOT NULL,
        began DOUBLE PRECISION NOT NULL,
        used BIGINT NOT NULL,
        finals INTEGER NOT NULL,
        ended DOUBLE PRECISION,
        is_released INTEGER NOT NULL,
        charged BIGINT NOT NULL,
        is_running INTEGER NOT NULL,
        is_open INTEGER NOT NULL
    )""",
    # Who holds reservations, and that it lives.
    """CREATE TABLE IF NOT EXISTS gateway_holders (
        name TEXT PRIMARY KEY,
        beat DOUBLE PRECISION NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_reservations_open ON gateway_reservations (began) WHERE is_open = 1",
    "CREATE INDEX IF NOT EXISTS gateway_reservations_done ON gateway_reservations (began) WHERE is_open = 0",
)
USAGE = (
    """CREATE TABLE IF NOT EXISTS gateway_usage_parts (
        request_id TEXT NOT NULL,
        part TEXT NOT NULL,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        total_tokens BIGINT NOT NULL,
        outcome TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (request_id, part)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_usage_parts_at ON gateway_usage_parts (at)",
    # The day is the number of days since 1970-01-01 in UTC.
    """CREATE TABLE IF NOT EXISTS gateway_usage (
        day INTEGER NOT NULL,
        key TEXT NOT NULL,
        tenant TEXT NOT NULL,
        model TEXT NOT NULL,
        requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL,
        PRIMARY KEY (day, key, tenant, model)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_usage_tenant ON gateway_usage (tenant, day)",
    """CREATE TABLE IF NOT EXISTS gateway_usage_totals (
        tenant TEXT PRIMARY KEY,
        requests BIGINT NOT NULL,
        prompt_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        completion_tokens BIGINT NOT NULL
    )""",
    # Requests before this time are pruned: their records would be counted a second time.
    """CREATE TABLE IF NOT EXISTS gateway_usage_pruned (
        id INTEGER PRIMARY KEY,
        before DOUBLE PRECISION NOT NULL
    )""",
    "INSERT INTO gateway_usage_pruned (id, before) VALUES (1, 0) ON CONFLICT (id) DO NOTHING",
)
LEDGER = (
    # Its name tells workers' records of this database from those of others.
    "CREATE TABLE IF NOT EXISTS gateway_ledger (id INTEGER PRIMARY KEY, name TEXT NOT NULL)",
)
ALL = (*LEDGER, *KEYS, *LIMITS, *USAGE, *RESPONSES, *BATCHES)
