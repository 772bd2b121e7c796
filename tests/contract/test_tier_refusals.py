"""Tests that tiers are refused for engines that cannot continue a prompt from stored blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynamo_vllm.engine.tiers.refusals import refuse_engines_without_prefix_caching


def config(*, prefix_caching: bool = True, non_causal: bool = False) -> Any:
    attention = SimpleNamespace(get_kv_cache_spec=lambda _: SimpleNamespace(non_causal=non_causal))
    shared = SimpleNamespace(get_kv_cache_spec=lambda _: None)  # it uses the cache of another layer
    layers = {"attention": attention, "shared": shared, "experts": object()}
    return cast(
        "Any",
        SimpleNamespace(
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
            compilation_config=SimpleNamespace(static_forward_context=layers),
        ),
    )


@pytest.mark.parametrize("given", [{"prefix_caching": False}, {"non_causal": True}])
def test_engine_that_cannot_continue_a_prompt_is_refused(given: dict[str, bool]) -> None:
    refuse_engines_without_prefix_caching(config())
    with pytest.raises(ValueError, match="turned prefix caching off.*--kv-offload-gb"):
        refuse_engines_without_prefix_caching(config(**given))


def test_vllm_names_the_layers_that_look_ahead_as_we_ask() -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    assert FullAttentionSpec.__dataclass_fields__["non_causal"].default is False
