"""What a worker tells a gateway of a request that it has ended."""

from __future__ import annotations

import msgspec

ENDPOINT = "gateway.usage"
"""Where gateways take records, within a namespace."""
METADATA = "gateway"
"""The metadata of a request that a gateway let in: request id, key id and ledger id, separated by spaces."""
FINISHED, ABORTED, MOVED, FAILED = "finished", "aborted", "moved", "failed"


class UsageRecord(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one prompt of one request, on one worker. The same record may be sent several times."""

    request_id: str
    """The gateway's id of the HTTP request."""
    part: str
    """The runtime's id of the prompt; it stays the same when a request moves to another worker."""
    key_id: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    """With those of a worker that had begun the answer."""
    outcome: str
    at: float
    """Seconds since 1970."""
    ledger_id: str = ""
    """The database that the gateway keeps its accounts in."""


class Admitted(msgspec.Struct, frozen=True):
    """Who pays for a request."""

    request_id: str
    key_id: str
    ledger_id: str

    @property
    def metadata(self) -> str:
        return f"{self.request_id} {self.key_id} {self.ledger_id}"


def admitted(metadata: str | None) -> Admitted | None:
    """Return what a gateway wrote into the metadata of a request; None if no gateway let it in."""
    words = metadata.split(" ") if metadata else []
    return Admitted(*words) if len(words) == 3 and all(words) else None
