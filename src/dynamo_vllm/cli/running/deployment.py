"""Finds the deployment that a command is for: the one named, or the only `serve` on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from dynamo_vllm.config.options import FindOptions
from dynamo_vllm.config.runtime_env import LOOPBACK_HOSTS
from dynamo_vllm.errors import ConfigError, StartError
from dynamo_vllm.supervise import run_folder
from dynamo_vllm.supervise.run_folder import RunFolder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

T = TypeVar("T", bound=FindOptions)
LOOPBACK = "127.0.0.1"


def find(options: T, environment: Mapping[str, str], url: str | None = None) -> tuple[T, RunFolder | None]:
    """Return the options with the discovery settings of a serve, and the folder of that serve.

    Without a running serve the options stay as they are. With a `url`, only the serve at that URL counts.
    """
    if options.discovery_backend != "file" or options.file_kv is not None:
        return options, None
    if options.run_dir is not None:
        folder = RunFolder(Path(options.run_dir).absolute())
        if not folder.is_held:
            raise ConfigError(f"--run-dir {folder.path}: no serve runs there")
        return _in(options, folder), folder
    running = run_folder.running(environment)
    if url is not None:
        running = [folder for folder in running if folder.url is not None and _is_same(folder.url, url)]
    if len(running) > 1:
        raise ConfigError(
            f"several serve processes run on this machine; name one with --run-dir:\n{_list(running)}"
        )
    return (_in(options, running[0]), running[0]) if running else (options, None)


def frontend(environment: Mapping[str, str]) -> str | None:
    """Return the URL of the only serve on this machine; None if none runs."""
    running = run_folder.running(environment)
    if len(running) > 1:
        raise ConfigError(
            f"several serve processes run on this machine; give the URL of one:\n{_list(running)}"
        )
    return running[0].url if running else None


def with_url_flag(argv: Sequence[str]) -> list[str]:
    """Insert --url before the first argument if that is not a flag."""
    return ["--url", *argv] if argv and not argv[0].startswith("-") else list(argv)


def serve_folder(run_dir: str | None, environment: Mapping[str, str]) -> RunFolder:
    """Return the folder of a running serve: the one named, or the only one on this machine."""
    if run_dir is not None:
        folder = RunFolder(Path(run_dir).absolute())
        if not folder.is_held:
            raise ConfigError(f"--run-dir {folder.path}: no serve runs there")
        return folder
    running = run_folder.running(environment)
    if not running:
        raise StartError("no serve of this user runs on this machine; name its folder with --run-dir")
    if len(running) > 1:
        raise ConfigError(
            f"several serve processes run on this machine; name one with --run-dir:\n{_list(running)}"
        )
    return running[0]


def _is_same(one: str, other: str) -> bool:
    """Return whether two URLs name one server; loopback has several names."""
    first, second = urlsplit(one), urlsplit(other)
    hosts = {first.hostname, second.hostname}
    return first.port == second.port and (len(hosts) == 1 or hosts <= set(LOOPBACK_HOSTS))


def _in(options: T, folder: RunFolder) -> T:
    """Return the options with those that serve noted. By default serve and its workers use loopback only.

    What the user named wins: workers of another namespace may be in the same discovery.
    """
    noted: dict[str, Any] = {"file_kv": str(folder.discovery), "bind_host": LOOPBACK, **folder.reach}
    if options.namespace != FindOptions().namespace:
        noted["namespace"] = options.namespace
    if options.bind_host:
        noted["bind_host"] = options.bind_host
    return dataclasses.replace(options, **noted)


def _list(running: Sequence[RunFolder]) -> str:
    return "\n".join(f"  {folder.path}  {folder.url or ''}".rstrip() for folder in running)
