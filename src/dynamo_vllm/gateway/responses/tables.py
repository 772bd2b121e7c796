"""The tables of responses. Items are rows of their own: later requests name and list them one by one.

An item that a request names by its id (`item_reference`) is a row that points to the original. So naming an
item again costs no room; how many bytes it stands for is counted in `gateway_response_sizes`.
"""

from __future__ import annotations

from dynamo_vllm.gateway.responses.items import LONGEST_ID

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
    "CREATE INDEX IF NOT EXISTS gateway_responses_queue ON gateway_responses (status, tenant, created)",
    """CREATE TABLE IF NOT EXISTS gateway_response_items (
        response TEXT NOT NULL,
        position INTEGER NOT NULL,
        id TEXT NOT NULL,
        is_output INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (response, position)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_response_items_id ON gateway_response_items (id)",
    # What the items of a response have with the originals that they stand for, so that nobody adds up bodies.
    """CREATE TABLE IF NOT EXISTS gateway_response_sizes (
        response TEXT PRIMARY KEY,
        items BIGINT NOT NULL,
        bytes BIGINT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS gateway_response_references (
        response TEXT NOT NULL,
        position INTEGER NOT NULL,
        target TEXT NOT NULL,
        target_position INTEGER NOT NULL,
        PRIMARY KEY (response, position)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_response_targets ON gateway_response_references (target)",
    # The newest item of a tenant with an id: clients choose ids of their own, and may use one many times.
    """CREATE TABLE IF NOT EXISTS gateway_response_item_names (
        id TEXT NOT NULL,
        tenant TEXT NOT NULL,
        response TEXT NOT NULL,
        position INTEGER NOT NULL,
        bytes BIGINT NOT NULL,
        PRIMARY KEY (id, tenant)
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_response_named ON gateway_response_item_names (response)",
    # Names for what was kept before this table existed; the bytes of its response are a bound of an item's.
    # Longer ids cannot be named, and an index of PostgreSQL has no room for them.
    f"""INSERT INTO gateway_response_item_names (id, tenant, response, position, bytes)
        SELECT i.id, r.tenant, i.response, i.position, r.bytes
        FROM gateway_response_items i JOIN gateway_responses r ON r.id = i.response
        WHERE r.status IN ('completed', 'incomplete')
        AND LENGTH(i.id) <= {LONGEST_ID}
        AND NOT EXISTS (SELECT 1 FROM gateway_response_item_names)
        ORDER BY r.created DESC, i.position DESC
        ON CONFLICT (id, tenant) DO NOTHING""",
    """CREATE TABLE IF NOT EXISTS gateway_kept (
        tenant TEXT NOT NULL,
        kind TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        PRIMARY KEY (tenant, kind)
    )""",
)
