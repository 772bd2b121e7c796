"""Writes the file of `--dump-config-to` before the start, and again when more is known."""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dynamo_vllm.config import build
from dynamo_vllm.errors import ConfigError

_SECRET = re.compile(r"(?:^|[_-])(?:token|secret|password|key|credentials?)$", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")


class Dump:
    """Write the file, if one was requested."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._found: dict[str, object] = {}

    def add(self, part: str, found: Any) -> None:
        if self._path is None:
            return
        self._found[part] = plain(found)
        try:
            Path(self._path).write_text(json.dumps(self._found, indent=2) + "\n")
        except OSError as exc:
            raise ConfigError(f"--dump-config-to {self._path} cannot be written: {exc.strerror}") from exc


def plain(value: Any) -> Any:
    """Convert to JSON values, without secrets: by name, and in addresses."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {
            str(name): build.HIDDEN if isinstance(item, str) and _SECRET.search(str(name)) else plain(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return plain(value.value)
    if value is None or isinstance(value, bool | int | float):
        return value
    return _of_text(str(value))


def _of_text(text: str) -> object:
    """Flags of vLLM may contain JSON."""
    if text.startswith("{"):
        try:
            return plain(json.loads(text))
        except json.JSONDecodeError:
            pass
    return _IN_ADDRESS.sub(build.HIDDEN, text)
