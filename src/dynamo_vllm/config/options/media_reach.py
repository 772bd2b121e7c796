"""Options that limit the addresses from which media may be fetched."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.runtime import RuntimeOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaReachOptions(RuntimeOptions):
    """Workers, which fetch media, and frontends, which inspect images to count their tokens."""

    media_hosts: tuple[str, ...] = opt(
        (),
        "multimodal",
        "Fetch media from these hosts only; *.example.com includes all subdomains (default: all public "
        "hosts).",
        env="DYN_VLLM_MEDIA_HOSTS",
        flags=("--media-hosts", "--allowed-media-domains"),
        metavar="HOST",
    )
    media_networks: tuple[str, ...] = opt(
        (),
        "multimodal",
        "Private networks from which media may be fetched, such as 10.1.0.0/16 (default: none).",
        env="DYN_VLLM_MEDIA_NETWORKS",
        metavar="NETWORK",
    )
