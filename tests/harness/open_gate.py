"""Lets every line of a batch pass, as with keys without limits."""

from __future__ import annotations

from dynamo_vllm.gateway import identity


class OpenGate:
    async def admit(self, request_id: str, key_id: str, path: str, body: bytes) -> dict[str, str]:
        return {identity.METERED: f"{request_id} {key_id} ledger", identity.PRIORITY: "-5"}

    def is_valid(self, key_id: str) -> bool:
        return True

    def ended(self, request_id: str) -> None:
        """Nothing was reserved."""
