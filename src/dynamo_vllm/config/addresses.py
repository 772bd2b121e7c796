"""Reads addresses of endpoints in discovery, and spells names as the runtime does."""

from __future__ import annotations

import re

SCHEME = "dyn://"
MAX_FILE_NAME = 255
"""In bytes; Linux has no file system with more."""
_INSTANCE_DIGITS = 16
_OTHER = re.compile(r"[^a-z0-9_-]")


def whole(text: str | None) -> str | None:
    """Return namespace.component.endpoint if the user wrote a whole address; None if it is one name."""
    return text.removeprefix(SCHEME) if text is not None and text.startswith(SCHEME) else None


def slug(name: str) -> str:
    """Return what the runtime (1.6.1) makes of a model's or adapter's name for keys and folders."""
    return _OTHER.sub("_", name.lower()).lstrip("_")


def escaped_bytes(key: str) -> int:
    """Return how long a key is in the name of a file of discovery: only letters and digits stay one byte."""
    return sum(1 if chr(byte).isalnum() and byte < 128 else 3 for byte in key.encode())


def adapter_room(address: str) -> int:
    """Return the bytes that an adapter's key may have in file discovery, beside its worker's address."""
    before = f"{address.replace('.', '/')}/{'f' * _INSTANCE_DIGITS}/"
    return max(0, MAX_FILE_NAME - escaped_bytes(before))
