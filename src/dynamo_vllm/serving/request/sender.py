"""Declares the part of the runtime's push egress that the request path uses."""

from __future__ import annotations

from typing import Protocol


class Sender(Protocol):
    """The runtime's push egress."""

    def send(self, chunk: dict[str, object]) -> None: ...

    def close(self) -> None: ...
