"""Every connector of the table: what it tells vLLM, and what it lets through to an engine."""

from __future__ import annotations

from typing import Any

import pytest

from dynamo_vllm.kv.connectors import CONNECTORS, choose
from dynamo_vllm.kv.connectors.base import Connector, Place, Rejected, handover
from dynamo_vllm.kv.connectors.multi import Multi

HANDED = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4]],
    "remote_num_tokens": 60,
    "tp_size": 1,
}
EVERY: list[Connector] = [*CONNECTORS.values(), Multi([CONNECTORS["kvbm"], CONNECTORS["nixl"]])]


def handed(**changes: Any) -> dict[str, Any]:
    return handover({**HANDED, **changes}, 30)


@pytest.mark.parametrize("connector", EVERY, ids=lambda c: c.name)
@pytest.mark.parametrize("role", ["agg", "prefill", "decode"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tells_vllm_its_name_and_role(connector: Connector, role: str, device: str) -> None:
    config = connector.engine_config(Place(role=role, device=device))
    assert config["kv_connector"]
    assert config["kv_role"] in ("kv_both", "kv_producer", "kv_consumer")


@pytest.mark.parametrize("connector", EVERY, ids=lambda c: c.name)
def test_hands_over_what_it_asked_for(connector: Connector) -> None:
    """Either a job carries parameters on both sides, or on neither."""
    carries = connector.prefill_params() is not None
    assert (connector.decode_params(handed(), 64, 32) is not None) is carries


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "text",
        {},
        handover(None, 30),
        handover(HANDED, 0),
        {"kv_transfer_params": HANDED},
        {"kv_transfer_params": HANDED, "expires_at": "soon"},
        {"kv_transfer_params": "x", "expires_at": 1e12},
        handover({"do_remote_prefill": True}, 30),
        handed(do_remote_prefill=False),
        handed(remote_engine_id=""),
        handed(remote_request_id=None),
        handed(remote_host=None),
        handed(remote_host=""),
        handed(remote_port=0),
        handed(remote_port="5600"),
        handed(remote_port=70000),
        handed(remote_block_ids=[]),
        handed(remote_block_ids=[[]]),
        handed(remote_block_ids=[[-1]]),
        handed(remote_block_ids=[["a"]]),
        handed(remote_block_ids=[[3]]),
        handed(remote_block_ids=[[3, 4, 5]]),
        handed(tp_size=0),
    ],
    ids=str,
)
@pytest.mark.parametrize("connector", [EVERY[0], EVERY[-1]], ids=lambda c: c.name)
def test_nothing_that_would_kill_or_hang_an_engine_passes(connector: Connector, wrong: object) -> None:
    with pytest.raises(Rejected):
        connector.decode_params(wrong, 64, 32)


def test_a_missing_field_is_refused_whichever_it_is() -> None:
    for name in (
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "remote_block_ids",
        "tp_size",
    ):
        params = {key: value for key, value in HANDED.items() if key != name}
        with pytest.raises(Rejected, match=name):
            CONNECTORS["nixl"].decode_params(handover(params, 30), 64, 32)


def test_lost_caches_are_computed_anew_and_leases_are_set() -> None:
    config = CONNECTORS["nixl"].engine_config(Place(role="prefill", device="cpu", lease_seconds=7))
    assert config["kv_load_failure_policy"] == "recompute"
    assert config["kv_connector_extra_config"] == {"kv_lease_duration": 7}
    assert (config["kv_role"], config["kv_buffer_device"]) == ("kv_producer", "cpu")


def test_several_compose() -> None:
    place = Place(role="decode", device="cuda")
    first, second = choose(["kvbm", "nixl"]), choose(["lmcache", "nixl"])
    assert first is not None and second is not None
    assert first.engine_config(place)["kv_connector"] == "PdConnector"
    assert second.engine_config(place)["kv_connector"] == "MultiConnector"
    names = [
        part["kv_connector"]
        for part in second.engine_config(place)["kv_connector_extra_config"]["connectors"]
    ]
    assert names == ["LMCacheConnectorV1", "NixlConnector"]


@pytest.mark.parametrize("names", [[], ["none"], ["null"]])
def test_none_is_none(names: list[str]) -> None:
    assert choose(names) is None


def test_what_the_user_wrote_stands_and_nixl_in_it_is_checked() -> None:
    written = choose([], '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}')
    inside = choose(
        [],
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config":'
        ' {"connectors": [{"kv_connector": "NixlConnector"}]}}',
    )
    for connector in (written, inside):
        assert connector is not None
        with pytest.raises(Rejected):
            connector.decode_params(handover({"do_remote_prefill": True}, 30), 64, 32)
    other = choose([], '{"kv_connector": "ExampleConnector"}')
    assert other is not None and other.decode_params(handover({"a": 1}, 30), 64, 32) == {"a": 1}
