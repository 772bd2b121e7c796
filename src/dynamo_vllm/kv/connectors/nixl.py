"""NIXL: the decode engine reads the prefill engine's blocks over RDMA, NVLink or shared memory."""

from __future__ import annotations

from typing import Any

import msgspec

from dynamo_vllm.kv.connectors.base import (
    PREFILL_PARAMS,
    ConnectorPlace,
    Needs,
    Rejected,
    kv_role,
    transfer_params,
)


class Handover(msgspec.Struct, frozen=True):
    """The transfer parameters of vLLM's NIXL connector.

    vLLM 0.30 crashes on parameters without an engine id, without blocks or with too few of them, and waits
    forever without a host.
    """

    do_remote_prefill: bool
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    remote_block_ids: list[list[int]]
    tp_size: int
    do_remote_decode: bool = False
    remote_num_tokens: int | None = None


class Nixl:
    name = "nixl"
    has_plain_blocks = False

    def engine_config(self, place: ConnectorPlace) -> dict[str, Any]:
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role(place),
            # A KV cache that cannot be fetched is recomputed; vLLM's default silently ends the request.
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"kv_lease_duration": place.lease_seconds},
        }
        if place.device == "cpu":
            config["kv_buffer_device"] = "cpu"
        return config

    def needs(self, place: ConnectorPlace) -> Needs:
        return Needs()

    def prefill_params(self) -> dict[str, object]:
        return dict(PREFILL_PARAMS)

    def decode_params(self, handed: object, prompt_tokens: int, block_size: int) -> dict[str, object]:
        params = transfer_params(handed)
        try:
            found = msgspec.convert(params, Handover)
        except msgspec.ValidationError as exc:
            raise Rejected(f"kv_transfer_params: {exc}") from None
        if not (
            found.do_remote_prefill
            and found.remote_engine_id
            and found.remote_request_id
            and found.remote_host
        ):
            raise Rejected("kv_transfer_params: an empty field")
        if not 0 < found.remote_port < 65536 or found.tp_size < 1:
            raise Rejected("kv_transfer_params: a number out of range")
        blocks = [block for group in found.remote_block_ids for block in group]
        # Groups with a sliding window have fewer blocks, one has them all.
        count, wanted = max(map(len, found.remote_block_ids), default=0), -(-prompt_tokens // block_size)
        if count != wanted or min(blocks) < 0:
            raise Rejected(f"kv_transfer_params: {count} blocks for a prompt of {wanted}")
        return params
