"""Divides memory for the files of clients between tenants."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from dynamo_vllm.gateway.replies import GatewayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARE = 3
"""One tenant has at most so many times what is still free, as it has slots: there is always room for more."""
RETRY = {"retry-after": "2"}


class UploadRoom:
    """Counts bytes that are there. It belongs to one event loop."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._of_tenants: Counter[str] = Counter()

    @property
    def used(self) -> int:
        return self._of_tenants.total()

    @contextlib.contextmanager
    def growing(self, tenant: str) -> Iterator[Callable[[int], None]]:
        """Yield what takes so many more bytes, or raises GatewayError; all come back at the end."""
        size = 0

        def grow(more: int) -> None:
            nonlocal size
            self._take(tenant, more)
            size += more

        try:
            yield grow
        finally:
            self._of_tenants[tenant] -= size
            if not self._of_tenants[tenant]:
                del self._of_tenants[tenant]

    def _take(self, tenant: str, more: int) -> None:
        free = self._total - self.used - more
        if free < 0:
            raise GatewayError(503, "too many files are being uploaded; try again", headers=RETRY)
        if self._of_tenants[tenant] + more > SHARE * free:
            raise GatewayError(429, "this tenant uploads too many files at once; try again", headers=RETRY)
        self._of_tenants[tenant] += more
