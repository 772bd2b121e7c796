"""Options about whom a URL of a picture, video or sound may make a process ask."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.runtime import RuntimeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReachOptions(RuntimeOptions):
    """Workers, which fetch media, and frontends, which look at pictures to count their tokens."""

    media_hosts: tuple[str, ...] = opt(
        (),
        "multimodal",
        "Ask only these hosts for media; *.example.com stands for all below it (default: all public ones).",
        env="DYN_VLLM_MEDIA_HOSTS",
        flags=("--media-hosts", "--allowed-media-domains"),
        metavar="HOST",
    )
    media_networks: tuple[str, ...] = opt(
        (),
        "multimodal",
        "Private networks that may be asked for media, such as 10.1.0.0/16 (default: none).",
        env="DYN_VLLM_MEDIA_NETWORKS",
        metavar="NETWORK",
    )
