"""Finds a model's config.json: a file, a folder, or the hub's cache on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import folders
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "config.json"


def find(model: str, environment: Mapping[str, str]) -> Path:
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        if (path / NAME).is_file():
            return path / NAME
        if (path / "model_index.json").is_file():
            raise ConfigError(
                f"{model} is a pipeline of several models; give one part of it, such as {model}/text_encoder"
            )
        raise ConfigError(f"{model} has no {NAME}; give the folder of a model, or the file itself")
    if model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _cached(model, environment)
    raise ConfigError(f"{model}: there is no such file or folder; give a model's {NAME} or its folder")


def _cached(model: str, environment: Mapping[str, str]) -> Path:
    """Return the newest snapshot of a hub id; nothing is downloaded."""
    home = Path(environment.get("HF_HOME") or folders.cache(environment) / "huggingface")
    hub = Path(environment.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{model.replace('/', '--')}"
    main = folder / "refs" / "main"
    revision = main.read_text().strip() if main.is_file() else "*"
    found = sorted(folder.glob(f"snapshots/{revision}/{NAME}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(
            f"{model} is neither a folder nor in the hub's cache ({hub}); fetch its {NAME} and give that file"
        )
    return found[-1]


def load(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_text())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from None
    except (ValueError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not JSON: {exc}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is not a JSON object; give a model's {NAME}")
    return found
