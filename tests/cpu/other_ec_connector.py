"""An encoder cache connector that is not ours: vLLM's own over a folder, under another name."""

from __future__ import annotations

from vllm.distributed.ec_transfer.ec_connector.example_connector import ECExampleConnector


class OtherConnector(ECExampleConnector):
    """Is loaded by vLLM from this module."""
