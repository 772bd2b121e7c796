"""Checks the names of adapters, and how discovery changes them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dynamo_vllm.errors import AdapterConflict, BadCommand

if TYPE_CHECKING:
    from collections.abc import Collection

MAX_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9._:/-]+")
_OTHER = re.compile(r"[^a-z0-9_-]")


def check(name: str, reserved: Collection[str]) -> None:
    """Raise if the name cannot be used; `reserved` are the base model's names."""
    if name in reserved:
        raise AdapterConflict(f"{name!r} is the base model's name; give the adapter another one")
    if (
        len(name) > MAX_NAME
        or not _NAME.fullmatch(name)
        or any(part in ("", ".", "..") for part in name.split("/"))
        or not card(name)  # the base model's own card, which it would replace
    ):
        raise BadCommand(
            f"{name[:MAX_NAME]!r} is not a valid name of an adapter; use letters, digits and . _ - / : "
            f"(at most {MAX_NAME} characters, one letter or digit, "
            "no empty, . or .. parts between slashes)"
        )


def card(name: str) -> str:
    """Return the key of the card in discovery, as the runtime (1.6.1) makes it from a name."""
    return _OTHER.sub("_", name.lower()).lstrip("_")
