from __future__ import annotations

import pytest

from dynamo_vllm.gateway.control import capacity
from dynamo_vllm.gateway.control.authorization import (
    DEFAULT_TOKENS,
    MOST_PROMPT_TOKENS,
    check_nvext,
    reserved_tokens,
)
from dynamo_vllm.gateway.envoy import config, routes
from dynamo_vllm.gateway.replies import GatewayError


@pytest.mark.parametrize(
    ("size", "asked", "tokens"),
    [
        ("300", "50", 150),
        ("300", None, 100 + DEFAULT_TOKENS),
        ("300", "", 100 + DEFAULT_TOKENS),
        ("300", "many", 100 + DEFAULT_TOKENS),
        ("300", "-5", 100 + DEFAULT_TOKENS),
        ("300", "1e999", 100 + DEFAULT_TOKENS),
        ("300", "50.0", 150),
        ("99999999", "1", MOST_PROMPT_TOKENS + 1),
        (None, "7", 7),
    ],
)
def test_tokens_are_reserved_whatever_the_client_writes(
    size: str | None, asked: str | None, tokens: int
) -> None:
    given = {config.BYTES: size, config.MAX_TOKENS: asked}
    assert reserved_tokens({name: text for name, text in given.items() if text is not None}) == tokens


@pytest.mark.parametrize(
    "body", [b"{", b"[]", b'{"nvext": 3}', b'{"nvext": null}', b'{"nvext": {"extra_fields": []}}']
)
def test_a_body_without_pins_passes(body: bytes) -> None:
    check_nvext(body)


def test_a_pin_is_found_however_it_is_written() -> None:
    with pytest.raises(GatewayError, match=r"nvext\.dp_rank"):
        check_nvext(b'{"nve\\u0078t": {"dp_ran\\u006b": null}}')


def test_every_path_has_one_part_that_answers() -> None:
    stateless = [route for route in routes.ROUTES if route.only_stateless]
    assert [route.path for route in stateless] == ["/v1/responses"]
    past_frontend = [route for route in routes.ROUTES if route.only_past_frontend]
    assert [(route.path, route.to) for route in past_frontend] == [("/v1/embeddings", routes.CONTROL)]
    paths = [route.path for route in routes.ROUTES if route not in (*stateless, *past_frontend)]
    assert len(paths) == len(set(paths))
    for path in ("/v1/files/file-1/content", "/v1/responses/resp_1/input_items", "/v1/batches/b/cancel"):
        found = routes.find(path)
        assert found is not None and found.to == routes.CONTROL
    assert routes.find("/v1/filesystem") is None and routes.find("/v1") is None


def test_slots_of_all_workers_are_added_up() -> None:
    lines = [
        'dynamo_frontend_model_max_num_seqs{model="a"} 256',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="1",worker_type="decode"} 3',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="1",worker_id="1",worker_type="decode"} 0',
        'dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="2",worker_type="prefill"} 0',
    ]
    assert capacity.read("\n".join(lines)) == 512
    assert capacity.read("") is None
