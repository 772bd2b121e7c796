"""Checks the names of adapters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynamo_vllm.config import addresses
from dynamo_vllm.errors import AdapterConflict, BadCommand

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9._:/-]+")


def check(name: str, reserved: Collection[str], room: int | None = None) -> None:
    """Raise if the name cannot be used; `reserved` are the base model's names.

    `room` are the bytes that discovery has for the adapter's key, if there is a limit.
    """
    if name in reserved:
        raise AdapterConflict(f"{name!r} is the base model's name; give the adapter another one")
    if (
        len(name) > MAX_NAME
        or not _NAME.fullmatch(name)
        or any(part in ("", ".", "..") for part in name.split("/"))
        or not addresses.slug(name)  # the base model's own card, which it would replace
    ):
        raise BadCommand(
            f"{name[:MAX_NAME]!r} is not a valid name of an adapter; use letters, digits and . _ - / : "
            f"(at most {MAX_NAME} characters, one letter or digit, "
            "no empty, . or .. parts between slashes)"
        )
    taken = addresses.escaped_bytes(addresses.slug(name))
    if room is not None and taken > room:
        raise BadCommand(
            f"{name!r} is too long for file discovery, where letters and digits take 1 byte and other "
            f"characters 3: it takes {taken} bytes, and this worker's address leaves {room}; "
            "use a shorter name"
        )
