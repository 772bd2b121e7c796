"""Rules for the limits of media loading."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config.rules import bounds
from dynamo_vllm.errors import ConfigError

if TYPE_CHECKING:
    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.options.media_reach import MediaReachOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

MAX_MEGAPIXELS = 89
"""Pillow warns about larger images, and refuses those twice as large."""
_ABOVE_ZERO = (
    "media_max_mb",
    "media_max_megapixels",
    "media_max_video_megapixels",
    "media_max_seconds",
    "media_timeout_seconds",
    "media_queue_seconds",
    "media_memory_mb",
)
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?|[0-9a-f:]+", re.IGNORECASE)


def media_limits_are_limits(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.above_zero(o, *_ABOVE_ZERO)
    if not 0 <= o.media_cache_mb < float("inf"):
        raise ConfigError(f"--media-cache-mb {o.media_cache_mb} must be 0 or more")
    if o.media_max_megapixels > MAX_MEGAPIXELS:
        raise ConfigError(
            f"--media-max-megapixels {o.media_max_megapixels:g} is above {MAX_MEGAPIXELS}, "
            "the most that Pillow decodes; use a lower limit"
        )


def media_counts_are_counts(o: WorkerOptions, _: EngineFlags) -> None:
    bounds.at_least(o, 0, "media_max_images", "media_max_videos", "media_max_audios", "media_redirects")
    bounds.at_least(o, 1, "media_max_frames", "media_at_once", "media_threads")


def media_hosts_are_names(o: MediaReachOptions, _: EngineFlags | None = None) -> None:
    for host in o.media_hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"--media-hosts {host!r} is not a host name; give only the name, such as example.com or "
                "*.example.com"
            )


def media_networks_are_networks(o: MediaReachOptions, _: EngineFlags | None = None) -> None:
    for network in o.media_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as exc:
            raise ConfigError(f"--media-networks {network!r} is not a network: {exc}") from None


def media_folder_is_a_folder(o: WorkerOptions, _: EngineFlags) -> None:
    if o.media_folder is None:
        return
    folder = Path(o.media_folder)
    if not folder.is_dir():
        raise ConfigError(f"--media-folder {o.media_folder}: there is no such folder")
    if folder.resolve() == Path("/"):
        raise ConfigError(
            f"--media-folder {o.media_folder} would let clients read every file; give another folder"
        )


RULES = (
    media_limits_are_limits,
    media_counts_are_counts,
    media_hosts_are_names,
    media_networks_are_networks,
    media_folder_is_a_folder,
)
