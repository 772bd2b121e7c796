"""Names the endpoint where workers convert tokens; commands import it without the rest."""

from __future__ import annotations

ENDPOINT = "tokens.convert"


def endpoint_of(address: str) -> str:
    """The endpoint of all workers in the namespace of `address`, a worker's own."""
    return f"{address.split('.')[0]}.{ENDPOINT}"
