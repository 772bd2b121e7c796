"""Executes an operator's commands on a running vLLM: sleep, caches, adapters, profiles."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError
from vllm.lora.request import LoRARequest

from dynamo_vllm.engine import base
from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.errors import AdapterRefused, EngineDead, EngineRequestFailed, WrongState

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from dynamo_vllm.engine.vllm.names import Config, Llm
    from dynamo_vllm.job import Adapter

logger = logging.getLogger(__name__)


class Control:
    """Has one method per operation, and converts vLLM's errors to ours."""

    def __init__(self, llm: Llm) -> None:
        self._llm = llm
        self._has_lost_weights = False
        self._steps: dict[type, Callable[[Any], Coroutine[Any, Any, int | None]]] = {
            base.Sleep: self._sleep,
            base.Wake: self._wake,
            base.Pause: self._pause,
            base.Resume: self._resume,
            base.ResetCache: self._reset,
            base.AddAdapter: self._add,
            base.RemoveAdapter: self._remove,
            base.StartProfile: self._start_profile,
            base.StopProfile: self._stop_profile,
        }

    async def do(self, op: base.EngineOp) -> int | None:
        """Executes one operation; returns the bytes of device memory that it freed, if known."""
        try:
            return await self._steps[type(op)](op)
        except (WrongState, AdapterRefused):
            raise
        except Exception as exc:
            found = convert.error(exc)
            if isinstance(found, EngineDead):
                raise found from exc
            raise EngineRequestFailed(f"{type(op).__name__}: {type(exc).__name__}: {exc}") from exc

    async def _sleep(self, op: base.Sleep) -> int | None:
        before = await self._free_bytes()
        # No job is running now; vLLM's default mode would abort jobs.
        await self._llm.sleep(op.level, mode="wait")
        self._has_lost_weights = op.level == 2
        after = await self._free_bytes()
        return None if before is None or after is None else after - before

    async def _wake(self, _: base.Wake) -> None:
        llm = self._llm
        if self._has_lost_weights and llm.vllm_config.model_config.enable_sleep_mode:
            await llm.wake_up(["weights"])
            await llm.collective_rpc("reload_weights")
            await llm.wake_up(["kv_cache"])
        else:
            await llm.wake_up()
        self._has_lost_weights = False

    async def _free_bytes(self) -> int | None:
        """Returns the free memory of all devices of the engine; None if sleep frees nothing."""
        config = self._llm.vllm_config
        if not config.model_config.enable_sleep_mode:
            return None
        try:
            return int(sum(await self._llm.collective_rpc("dynamo_free_bytes")))
        except Exception as exc:  # the user's own worker extension does not have it
            logger.info("cannot measure how much memory sleep frees: %s", exc)
            return None

    async def _pause(self, _: base.Pause) -> None:
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def _resume(self, _: base.Resume) -> None:
        await self._llm.resume_generation()

    async def _reset(self, op: base.ResetCache) -> None:
        if "prefix" in op.kinds:
            # vLLM would empty the tiers also when it refuses to empty its own cache, and tell no router.
            done = await self._llm.reset_prefix_cache(reset_connector=False)
            if done and op.with_tiers:  # without a connector vLLM ignores that it has none
                done = await self._llm.reset_prefix_cache(reset_connector=True)
            if not done:
                raise WrongState("KV blocks are in use; try again when the running requests have ended")
        if "multimodal" in op.kinds:
            await self._llm.reset_mm_cache()
        if "encoder" in op.kinds:
            await self._llm.reset_encoder_cache()

    async def _add(self, op: base.AddAdapter) -> None:
        """Loads an adapter in advance: a request with an adapter that cannot be loaded crashes the engine."""
        try:
            added = await self._llm.add_lora(lora_request(op.adapter))
        except Exception as exc:
            if isinstance(convert.error(exc), EngineDead):
                raise
            raise AdapterRefused(f"vLLM refuses it: {_reason(exc)}") from exc
        if not added:
            raise AdapterRefused("vLLM refuses it: its id is in use")

    async def _remove(self, op: base.RemoveAdapter) -> None:
        await self._llm.remove_lora(op.adapter.id)

    async def _start_profile(self, op: base.StartProfile) -> None:
        """vLLM 0.30 and 0.31 ignore a second start, 0.32 refuses it."""
        try:
            await self._llm.start_profile(op.prefix)
        except GracefulHTTPError as exc:
            raise WrongState("a profile is being recorded; stop it first") from exc

    async def _stop_profile(self, _: base.StopProfile) -> None:
        await self._llm.stop_profile()


def lora_request(adapter: Adapter) -> LoRARequest:
    """Converts an adapter to vLLM's type."""
    return LoRARequest(adapter.engine_name, adapter.id, adapter.path)


def _reason(exc: Exception) -> str:
    """Returns the last line of the message, which may be a whole traceback of the engine's process."""
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    return lines[-1] if lines else type(exc).__name__


def profile_folder(config: Config) -> str | None:
    """Returns where profiles are written; None if profiling is off."""
    profiler = config.profiler_config
    if profiler.profiler is None:
        return None
    return str(profiler.torch_profiler_dir or profiler.proton_profiler_dir or "the profiler's own")
