"""Writes documents as YAML text into a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_vllm.errors import ConfigError, StartError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from dynamo_vllm.export.settings import Document

MARK = "# Made by: dynamo-vllm export "
"""The beginning of the first line of every file that export writes."""


def yaml_text(documents: Iterable[Document], command: str) -> str:
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    parts = [
        yaml.dump(document, Dumper=Dumper, sort_keys=False, width=110, allow_unicode=True)
        for document in documents
    ]
    return f"{MARK}{command}\n" + "---\n".join(parts)


def write(folder: Path, texts: Mapping[str, str], *, force: bool, beside: Path) -> list[str]:
    """Write the files; return names of ours that an earlier export left and this one has not.

    Files that are not ours stay, with --force too. `beside` is the file that was read: it may be there.
    """
    there = _entries(folder)
    others = sorted(name for name in there if (folder / name).resolve() != beside.resolve())
    if others and not force:
        raise ConfigError(
            f"-o {folder} is not empty ({', '.join(others[:3])}{', …' if len(others) > 3 else ''}); choose "
            "another folder, or add --force to write over files of an earlier export"
        )
    foreign = [name for name in texts if name in there and not is_ours(folder / name)]
    if foreign:
        raise ConfigError(f"{folder / foreign[0]} was not made by export; move it, or choose another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as exc:
        raise StartError(f"-o {folder} cannot be written: {exc.strerror}") from None
    return [name for name in others if name not in texts and is_ours(folder / name)]


def _entries(folder: Path) -> list[str]:
    try:
        return [entry.name for entry in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigError(f"-o {folder} cannot be read as a folder: {exc.strerror}") from None


def is_ours(path: Path) -> bool:
    try:
        with path.open() as file:
            return file.readline().startswith(MARK)
    except (OSError, UnicodeDecodeError):
        return False
