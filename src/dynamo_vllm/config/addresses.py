"""Reads addresses of endpoints in discovery, which users may write whole."""

from __future__ import annotations

SCHEME = "dyn://"


def whole(text: str | None) -> str | None:
    """Return namespace.component.endpoint if `text` is a whole address; None if it is one name."""
    return text.removeprefix(SCHEME) if text is not None and text.startswith(SCHEME) else None
