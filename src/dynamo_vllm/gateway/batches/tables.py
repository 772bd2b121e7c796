"""The tables of files and batches. What files say is in a folder, not here."""

from __future__ import annotations

TABLES = (
    """CREATE TABLE IF NOT EXISTS gateway_files (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        purpose TEXT NOT NULL,
        name TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_files_tenant ON gateway_files (tenant, created)",
    "CREATE INDEX IF NOT EXISTS gateway_files_expires ON gateway_files (expires)",
    # Room for files that are being uploaded, as long as a gateway says so.
    """CREATE TABLE IF NOT EXISTS gateway_uploads (
        file TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        bytes BIGINT NOT NULL,
        expires DOUBLE PRECISION NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_uploads_tenant ON gateway_uploads (tenant)",
    # `cache_salt` is not used: a line has that of the batch's key, as every request of the key.
    """CREATE TABLE IF NOT EXISTS gateway_batches (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        key_id TEXT NOT NULL,
        cache_salt TEXT,
        endpoint TEXT NOT NULL,
        file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        metadata TEXT,
        status TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        expires DOUBLE PRECISION NOT NULL,
        started DOUBLE PRECISION,
        finalizing DOUBLE PRECISION,
        cancelling DOUBLE PRECISION,
        ended DOUBLE PRECISION,
        errors TEXT,
        total INTEGER NOT NULL,
        completed INTEGER NOT NULL,
        failed INTEGER NOT NULL,
        input_tokens BIGINT NOT NULL,
        cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL,
        reasoning_tokens BIGINT NOT NULL,
        output_file TEXT,
        error_file TEXT,
        owner TEXT,
        beat DOUBLE PRECISION NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS gateway_batches_tenant ON gateway_batches (tenant, created)",
    "CREATE INDEX IF NOT EXISTS gateway_batches_status ON gateway_batches (status)",
    # For turns between tenants, and for batches whose time has ended before they run.
    """CREATE INDEX IF NOT EXISTS gateway_batches_turns ON gateway_batches (tenant, beat, created, id)
        WHERE ended IS NULL""",
    """CREATE INDEX IF NOT EXISTS gateway_batches_expires ON gateway_batches (expires)
        WHERE ended IS NULL""",
    "CREATE INDEX IF NOT EXISTS gateway_batches_ended ON gateway_batches (ended)",
    # One row per answered line: which piece of which part file is its answer.
    """CREATE TABLE IF NOT EXISTS gateway_batch_lines (
        batch TEXT NOT NULL,
        number INTEGER NOT NULL,
        part TEXT NOT NULL,
        start BIGINT NOT NULL,
        length INTEGER NOT NULL,
        is_error INTEGER NOT NULL,
        PRIMARY KEY (batch, number)
    )""",
    # Runs that ended with a defect, of batches that have not ended.
    """CREATE TABLE IF NOT EXISTS gateway_batch_failures (
        batch TEXT PRIMARY KEY,
        runs INTEGER NOT NULL,
        reason TEXT NOT NULL
    )""",
)
