"""Options of a worker about guides: what it takes to compile one."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.omni import OmniOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideOptions(OmniOptions):
    """A process that takes schemas, regular expressions and grammars for its answers."""

    guide_seconds: float = opt(
        2.0,
        "requests",
        "Processor time that compiling a schema, regex or grammar of a request may take; more is a 400.",
        env="DYN_VLLM_GUIDE_SECONDS",
        metavar="SECONDS",
    )
    guide_memory_mb: int = opt(
        512,
        "requests",
        "Memory that compiling one may take; more is a 400.",
        env="DYN_VLLM_GUIDE_MEMORY_MB",
        metavar="MB",
    )
