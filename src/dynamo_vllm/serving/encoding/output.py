"""Where encoder output is kept: our folder, or a connector that the user chose."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_vllm.config import encoders
from dynamo_vllm.config.encoders import EncoderFolder, EncoderOutput, OtherConnector
from dynamo_vllm.engine.encoder_cache.folder import Folder, engine_config

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dynamo_vllm.config.worker_plan import WorkerPlan
    from dynamo_vllm.job import EngineFacts

logger = logging.getLogger(__name__)


def ec_transfer(output: EncoderOutput | None) -> Mapping[str, object] | None:
    """Return vLLM's ec_transfer_config; None for a worker without one of ours."""
    if isinstance(output, OtherConnector):
        return output.config
    if output is None or output.connector_role is None:
        return None
    return engine_config(output.connector_role, output.path, output.max_bytes)


def encoded_folder(folder: EncoderFolder, facts: EngineFacts) -> Folder:
    """Return the part of the folder that engines like this one use."""
    return Folder(Path(folder.path, facts.encoder), folder.max_bytes)


def warn_of_other_connector(plan: WorkerPlan) -> None:
    if (name := encoders.other_connector(plan.options, plan.flags)) is not None:
        logger.warning(
            "the encoder cache connector %s is passed on to vLLM and was not tested; "
            "the tested one is %s over a folder (--ec-storage-path)",
            name,
            encoders.FOLDER_CONNECTOR,
        )
