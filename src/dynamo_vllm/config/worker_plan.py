"""Resolves a worker's command line once: our options, vLLM's flags, and what follows from both."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.config import addresses, build, encoders, model_kind, nodes
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.rules.connectors import OFFLOADERS
from dynamo_vllm.config.rules.flags import engine_flags

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.config.encoders import EncoderOutput
    from dynamo_vllm.config.nodes import Node
    from dynamo_vllm.config.rules.flags import EngineFlags

HANDS_OVER = ("nixl",)
"""The connector of roles that hand a KV cache over or fetch one, if the user names none."""
TIERS = "offload"
"""The connector that --kv-offload-gb and --kv-offload-disk imply, unless another one keeps caches."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What a worker will run. Only this module reads vLLM's flags from a command line."""

    options: WorkerOptions
    engine_argv: tuple[str, ...]
    """vLLM's flags in order, as given."""
    flags: EngineFlags
    """The same by name."""
    node: Node
    """The place of this process among those of one engine."""
    encoder_output: EncoderOutput | None
    """The transfer of encode workers; None for a worker that does not use them."""

    @classmethod
    def of(cls, options: WorkerOptions, engine_argv: Sequence[str] = ()) -> WorkerPlan:
        flags = engine_flags(engine_argv)
        options = with_transfer_role(with_kind_of_model(with_own_address(options), flags), flags)
        options = with_connector(options, flags)
        node, output = nodes.from_flags(options.headless, flags), encoders.output_of(options, flags)
        return cls(options, tuple(engine_argv), flags, node, output)

    def with_options(self, options: WorkerOptions) -> WorkerPlan:
        """Return the plan with what became known of the options during the start."""
        return dataclasses.replace(self, options=with_kind_of_model(options, self.flags))


def parse(
    argv: Sequence[str],
    env: Mapping[str, str],
    prog: str = "dynamo-vllm worker",
    description: str = "",
    epilog: str = "",
) -> WorkerPlan:
    return WorkerPlan.of(*build.parse(WorkerOptions, argv, env, prog, description, epilog))


def with_own_address(options: WorkerOptions) -> WorkerOptions:
    """Return the options with each part of a whole address in its own place; a rule rejects a wrong one."""
    parts = (addresses.whole(options.endpoint) or "").split(".")
    if len(parts) != 3 or not all(parts):
        return options
    namespace, component, endpoint = parts
    return dataclasses.replace(options, namespace=namespace, component=component, endpoint=endpoint)


def with_kind_of_model(options: WorkerOptions, engine: EngineFlags) -> WorkerOptions:
    """Return the options with the role of a model that does not generate text, unless the user named one."""
    if options.disaggregation_mode is not None or options.older_roles or options.omni:
        return options
    kind = model_kind.kind_of(options.model, engine)
    return options if kind == model_kind.GENERATE else dataclasses.replace(options, disaggregation_mode=kind)


def with_transfer_role(options: WorkerOptions, engine: EngineFlags) -> WorkerOptions:
    """Return the options with the side of the transfer that --ec-transfer-config names.

    If the user also named another role, it stays, and a rule rejects the two.
    """
    written = encoders.transfer_config(engine).get("ec_role")
    if written == encoders.PRODUCER and options.card.does_all and options.disaggregation_mode is None:
        return dataclasses.replace(options, disaggregation_mode="encode")
    if written == encoders.CONSUMER and not options.card.encodes_media:
        return dataclasses.replace(options, ec_consumer_mode=True)
    return options


def with_connector(options: WorkerOptions, engine: EngineFlags) -> WorkerOptions:
    """Return the options with the connectors that a role and its tiers need, unless the user chose others."""
    chosen = options.connector
    if "kv_transfer_config" in engine or options.omni or {"none", "null"} & set(chosen):
        return options
    if not chosen and options.card.hands_over_kv:
        chosen = HANDS_OVER
    if options.kv_tier_flags and options.card.keeps_kv and not set(OFFLOADERS) & set(chosen):
        chosen = (*chosen, TIERS)
    return dataclasses.replace(options, connector=chosen)
