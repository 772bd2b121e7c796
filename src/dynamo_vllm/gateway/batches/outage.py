"""Tells outages of the machine and of the database from faults of a batch."""

from __future__ import annotations

import errno

from dynamo_vllm.errors import StartError
from dynamo_vllm.gateway.database import DatabaseAway

OUTAGES = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.ESTALE),
    *(errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN),
}
_OF_DATABASES = {"OperationalError", "InterfaceError"}
"""In every database's module (PEP 249): what the server or the disk caused, not the statement."""


def is_outage(exc: BaseException) -> bool:
    """Return whether the same work may succeed later, without a change of the batch."""
    if isinstance(exc, OSError) and exc.errno in OUTAGES:
        return True
    if isinstance(exc, (DatabaseAway, StartError, MemoryError)):
        return True
    return any(base.__name__ in _OF_DATABASES for base in type(exc).__mro__)
