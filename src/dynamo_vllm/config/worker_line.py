"""A worker's command line: our options, with what vLLM's flags beside them say about them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from dynamo_vllm.config import build, encoders
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.rules.flags import engine_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.rules.flags import EngineFlags


def parse(
    argv: Sequence[str],
    env: Mapping[str, str],
    prog: str = "dynamo-vllm worker",
    description: str = "",
    epilog: str = "",
) -> tuple[WorkerOptions, list[str]]:
    """The options, and the flags of vLLM in their order."""
    options, engine_argv = build.parse(WorkerOptions, argv, env, prog, description, epilog)
    return with_written_role(options, engine_flags(engine_argv)), engine_argv


def with_written_role(options: WorkerOptions, engine: EngineFlags) -> WorkerOptions:
    """The options with the side of the hand-over that --ec-transfer-config names.

    A role that the user named otherwise stands, and a rule refuses the two.
    """
    written = encoders.written(engine).get("ec_role")
    if written == encoders.PRODUCER and options.role == "agg" and options.disaggregation_mode is None:
        return dataclasses.replace(options, disaggregation_mode="encode")
    if written == encoders.CONSUMER and options.role != "encode":
        return dataclasses.replace(options, ec_consumer_mode=True)
    return options
