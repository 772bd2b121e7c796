"""A database of the gateway, empty for each test."""

from __future__ import annotations

from harness.gateway_store import database

__all__ = ["database"]
