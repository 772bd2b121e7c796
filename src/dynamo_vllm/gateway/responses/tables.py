"""The tables of responses. Items are rows of their own: later requests name and list them one by one."""

from __future__ import annotations

TABLES = (
    """CREATE TABLE IF NOT EXISTS gateway_responses (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        previous TEXT,
        created DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL,
        status TEXT NOT NULL,
        background INTEGER NOT NULL,
        body TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        request TEXT,
        headers TEXT,
        owner TEXT,
        beat DOUBLE PRECISION NOT NULL,
        starts INTEGER NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_responses_tenant ON gateway_responses (tenant, created)",
    "CREATE INDEX IF NOT EXISTS gateway_responses_expires ON gateway_responses (expires)",
    "CREATE INDEX IF NOT EXISTS gateway_responses_previous ON gateway_responses (previous)",
    "CREATE INDEX IF NOT EXISTS gateway_responses_status ON gateway_responses (status)",
    """CREATE TABLE IF NOT EXISTS gateway_response_items (
        response TEXT NOT NULL,
        position INTEGER NOT NULL,
        id TEXT NOT NULL,
        is_output INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (response, position)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_response_items_id ON gateway_response_items (id)",
    """CREATE TABLE IF NOT EXISTS gateway_kept (
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        PRIMARY KEY (tenant, kind)
    )""",
)
