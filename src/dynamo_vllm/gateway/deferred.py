"""Describes how requests pass that no client waits for: lines of batches, background responses."""

from __future__ import annotations

from typing import Protocol


class NotYet(Exception):
    """The limits of the key, or the tenant's share, do not allow the request now."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"not allowed for another {seconds:.1f} s")
        self.seconds = seconds
        """When to try again."""


class Gate(Protocol):
    """Decides about each of these requests as about one that a client sends with the same key."""

    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        """Return the headers with which the request is sent.

        Raise NotYet while limits do not allow it, so that nobody holds a slot while waiting for them, and
        GatewayError for a request that the key may not send. A request that is tried again has the same id.
        """

    def ended(self, request_id: str) -> None:
        """Note that a request that was admitted has ended, with or without an answer."""

    def is_valid(self, key_id: str) -> bool:
        """Return whether the key was neither revoked nor has expired: what runs for long asks again."""
