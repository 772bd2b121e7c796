"""Resolves how encode workers transfer their output, from our flags or vLLM's --ec-transfer-config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.rules.flags import EngineFlags

GB = 10**9
PRODUCER, CONSUMER = "ec_producer", "ec_consumer"
"""vLLM's names for the two sides of the transfer."""
FOLDER_CONNECTOR = "ECExampleConnector"
"""vLLM's connector over a folder; ours takes its place."""
SHARED_FOLDER = "shared_storage_path"
"""The one setting of vLLM's connector over a folder."""


@dataclass(frozen=True, slots=True)
class EncoderFolder:
    path: str
    max_bytes: int
    connector_role: str | None
    """PRODUCER or CONSUMER; None for a worker with direct transfer."""


@dataclass(frozen=True, slots=True)
class OtherConnector:
    """A connector of vLLM that is not ours, or the user's own."""

    name: str
    config: Mapping[str, object]
    """vLLM's ec_transfer_config."""


EncoderOutput = EncoderFolder | OtherConnector
"""How encoder output goes from encode workers to others."""


def output_of(options: WorkerOptions, engine: EngineFlags) -> EncoderOutput | None:
    """None for a worker that does not use encode workers."""
    is_encoder = options.card.encodes_media
    if not is_encoder and not options.asks_encoders:
        return None
    config = transfer_config(engine)
    inside = config.get("ec_connector_extra_config")
    extra = {**(inside if isinstance(inside, dict) else {}), **_parse_object(options.ec_extra_config)}
    path = options.ec_storage_path or extra.get(SHARED_FOLDER)
    if (name := other_connector(options, engine)) is not None:
        extra |= {SHARED_FOLDER: path} if path else {}
        role = PRODUCER if is_encoder else CONSUMER
        named = {"ec_role": role, **config, "ec_connector": name, "ec_connector_extra_config": extra}
        return OtherConnector(name, named)
    if not path:
        return None
    by_connector = options.ec_consumer_mode or bool(config)
    side = PRODUCER if is_encoder else CONSUMER if by_connector else None
    return EncoderFolder(str(path), int(options.ec_storage_gb * GB), side)


def other_connector(options: WorkerOptions, engine: EngineFlags) -> str | None:
    """Return the name of a connector that is passed on to vLLM; None if it is ours."""
    written = transfer_config(engine).get("ec_connector")
    name = options.ec_connector_backend or (str(written) if written else None)
    return None if name == FOLDER_CONNECTOR else name


def transfer_config(engine: EngineFlags) -> dict[str, object]:
    """Return the parsed --ec-transfer-config."""
    return _parse_object(engine.get("ec_transfer_config"))


def _parse_object(text: str | None) -> dict[str, object]:
    """Empty if it is not an object; a rule rejects that."""
    try:
        found = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return found if isinstance(found, dict) else {}
