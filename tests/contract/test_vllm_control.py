"""What an operator asks of vLLM, and what vLLM says to it."""

from __future__ import annotations

import contextlib
from http import HTTPStatus
from typing import Any

import pytest
import vllm
import vllm.exceptions
from vllm.exceptions import GracefulHTTPError

from dynamo_vllm.engine import base
from dynamo_vllm.engine.patches.patch import is_within
from dynamo_vllm.engine.vllm.control import Control
from dynamo_vllm.errors import EngineRequestFailed, WrongState


class Profiled:
    """An AsyncLLM whose engine records a profile already, or cannot record one."""

    def __init__(self, refusal: Exception) -> None:
        self._refusal = refusal

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        raise self._refusal


def control(refusal: Exception) -> Control:
    llm: Any = Profiled(refusal)
    return Control(llm)


async def test_second_profile_is_refused_as_the_workers_state_not_as_a_failure() -> None:
    active = control(GracefulHTTPError("A profiling session is already active.", HTTPStatus.CONFLICT))
    with pytest.raises(WrongState, match="stop it first") as refused:
        await active.do(base.StartProfile(None))
    assert refused.value.status == 409
    with pytest.raises(EngineRequestFailed, match="no room"):
        await control(RuntimeError("no room")).do(base.StartProfile(None))


class Emptied:
    """An AsyncLLM that notes which caches it is asked to empty."""

    def __init__(self, *answers: bool) -> None:
        self._answers = iter(answers)
        self.with_connector: list[bool] = []

    async def reset_prefix_cache(self, *, reset_connector: bool) -> bool:
        self.with_connector.append(reset_connector)
        return next(self._answers)


@pytest.mark.parametrize(
    ("answers", "with_tiers", "asked"),
    [
        ((True, True), True, [False, True]),
        ((True,), False, [False]),
        ((False,), True, [False]),
        ((True, False), True, [False, True]),
    ],
)
async def test_tiers_are_emptied_only_after_the_engines_own_cache(
    answers: tuple[bool, ...], with_tiers: bool, asked: list[bool]
) -> None:
    llm: Any = Emptied(*answers)
    reset = Control(llm).do(base.ResetCache(frozenset({"prefix"}), with_tiers=with_tiers))
    with contextlib.nullcontext() if all(answers) else pytest.raises(WrongState, match="in use"):
        await reset
    assert llm.with_connector == asked


@pytest.mark.skipif(is_within(vllm.__version__, "<0.32"), reason="older ones ignore a second start")
def test_vllm_refuses_it_with_this_class() -> None:
    error = vllm.exceptions.ProfilerAlreadyActiveError
    assert issubclass(error, GracefulHTTPError) and error().http_status == HTTPStatus.CONFLICT
