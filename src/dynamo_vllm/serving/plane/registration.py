"""Registers a worker's model card and endpoint in discovery, and removes them again."""

from __future__ import annotations

import asyncio
import functools
import logging
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo.llm import (
    ModelInput,
    ModelRuntimeConfig,
    ModelType,
    RouterConfig,
    RouterMode,
    WorkerType,
    register_model,
    unregister_model,
)

from dynamo_vllm.serving.encoding import pixels
from dynamo_vllm.serving.plane.failures import RuntimeFailed, of_runtime, when_not_busy

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from dynamo.runtime import Endpoint

    from dynamo_vllm.config.options import WorkerOptions
    from dynamo_vllm.config.role_cards import RoleCard
    from dynamo_vllm.job import EngineFacts

logger = logging.getLogger(__name__)
DISCOVERY_SECONDS = 5.0
FORGET_SECONDS = 0.5
_GONE = "Could not find key"
"""Runtime 1.6.1 with files: what should be removed is already gone."""
# The KV router needs tokens, so a role with text input says round-robin; otherwise the frontend would refuse
# the model.
_ROUTERS = {
    "kv": RouterMode.KV,
    "round-robin": RouterMode.RoundRobin,
    "least-loaded": RouterMode.LeastLoaded,
}
_MODEL_TYPES = {
    "chat": ModelType.Chat,
    "completions": ModelType.Completions,
    "images": ModelType.Images,
    "videos": ModelType.Videos,
    "audios": ModelType.Audios,
    "embeddings": ModelType.Embedding,
    "classify": ModelType.Classify,
    "pooling": ModelType.Pooling,
    "rerank": ModelType.Rerank,
}


class Registration:
    """Registers the model once, and takes the worker out of service and back as often as needed."""

    def __init__(
        self,
        endpoint: Endpoint,
        options: WorkerOptions,
        card: RoleCard,
        facts: EngineFacts,
        scratch_folder: str,
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._card = card
        self._facts = facts
        self._scratch_folder = scratch_folder
        self.prompt_tokens_per_second: float | None = None
        """Set before `publish`, if it was measured."""
        self._is_listed = False
        # What discovery may hold of this worker, also after a step whose result is unknown.
        self._has_instance = False
        self._has_card = False

    @property
    def names(self) -> tuple[str, ...]:
        return self._options.served_model_name or (str(self._options.model),)

    @property
    def endpoint_types(self) -> tuple[str, ...]:
        """Return the endpoints for clients; a role that only helps other workers has none."""
        of_role = self._card.endpoint_types
        return self._options.endpoint_types if of_role is None else of_role

    async def publish(self) -> None:
        """Put the model card into discovery. The instance itself appears when the endpoint is served."""
        model, *aliases = self.names
        if self._card.is_listed:
            self._has_card = True
            await self._register(model, model_aliases=aliases or None)
        self._is_listed = self._has_instance = True

    async def publish_adapter(self, name: str) -> None:
        """Publish a separate card: clients see the adapter as a model."""
        async with asyncio.timeout(DISCOVERY_SECONDS):
            await self._register(None, lora_name=name, base_model_path=str(self._options.model))

    async def withdraw_adapter(self, name: str) -> None:
        async with asyncio.timeout(DISCOVERY_SECONDS):
            await self._unregister(name)

    async def _unregister(self, name: str | None = None) -> None:
        try:
            with of_runtime():
                await unregister_model(self._endpoint, name)
        except RuntimeFailed as exc:
            if not str(exc).startswith(_GONE):
                raise

    async def _register(self, name: str | None, **more: object) -> None:
        card = self._card
        register = functools.partial(
            register_model,
            getattr(ModelInput, card.input),
            self._model_type(),
            self._endpoint,
            self._folder(),
            name,
            worker_type=getattr(WorkerType, card.worker_type),
            kv_cache_block_size=self._facts.block_size,
            runtime_config=self._runtime_config(),
            custom_template_path=self._options.custom_jinja_template,
            router_config=RouterConfig(_ROUTERS[card.router]) if card.router else None,
            needs=[[getattr(WorkerType, name) for name in group] for group in card.needs] or None,
            **pixels.card(self._options),
            # No max_gpu_lora_count: with it the router sends an adapter's requests to workers without the
            # adapter.
            **more,
        )
        await when_not_busy(register)

    def _folder(self) -> str:
        """Return the folder that the frontend reads: the model's, or one with an empty config.json.

        Runtime 1.6.1 wants this file of audio pipelines, but not of those for images and videos. Folders of
        diffusers have none, and nothing in it matters to a card with text input.
        """
        model = Path(str(self._options.model))
        if "audios" not in self.endpoint_types or (model / "config.json").exists():
            return str(model)
        folder = Path(self._scratch_folder, "audio-card")
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text("{}")
        return str(folder)

    def _model_type(self) -> ModelType:
        types = self.endpoint_types
        return reduce(or_, (_MODEL_TYPES[name] for name in types)) if types else ModelType.Prefill

    def _runtime_config(self) -> ModelRuntimeConfig:
        options, facts = self._options, self._facts
        config = ModelRuntimeConfig()
        config.context_length = facts.context_length
        config.total_kv_blocks = facts.total_kv_blocks
        config.max_num_seqs = facts.max_num_seqs
        # Our frontends use it only as the unit of their queue's threshold. A batch is no good one: it takes a
        # GPU a fifth of a second, and a CPU some seconds.
        speed = self.prompt_tokens_per_second
        config.max_num_batched_tokens = (
            facts.max_num_batched_tokens if speed is None else max(1, round(speed))
        )
        config.data_parallel_size = facts.data_parallel_size
        config.data_parallel_start_rank = facts.data_parallel_start_rank
        config.kv_event_publishing_enabled = bool(facts.kv_event_endpoints)
        config.enable_local_indexer = options.enable_local_indexer and bool(facts.kv_event_endpoints)
        if self._card.input == "Tokens":
            # The frontend (1.6.1) would parse calls in text only for whole answers, so the worker does it.
            config.tool_call_parser = options.tool_call_parser
            config.reasoning_parser = options.reasoning_parser
        config.exclude_tools_when_tool_choice_none = options.exclude_tools_when_tool_choice_none
        config.set_engine_specific(
            "migration_limit", str(options.migration_limit if self._card.may_migrate else 0)
        )
        return config

    async def withdraw(self) -> bool:
        """Leave routing; running requests continue. Returns whether discovery removed the worker; if not,
        retry.

        A helper role removes its card first: the frontend then answers without it. The frontend fails
        requests that it just sent to a vanished instance of such a role; for other roles it tries another
        worker.
        """
        self._is_listed = False
        if self._helps_others and self._has_card:
            await self._remove_card()
            await asyncio.sleep(FORGET_SECONDS)  # nothing tells us when the frontend has noticed
        if self._has_instance:
            gone = await _attempt("leave discovery", self._endpoint.unregister_endpoint_instance())
            self._has_instance = not gone
        return not (self._has_instance or (self._helps_others and self._has_card))

    async def restore(self) -> bool:
        """Return whether the worker is listed again; a later answer of the engine tries again."""
        if not self._is_listed:
            self._has_instance = True
            is_back = await _attempt("return to discovery", self._endpoint.register_endpoint_instance())
            if is_back and self._helps_others:
                is_back = await _attempt("list the model", self.publish())
            self._is_listed = is_back
        return self._is_listed

    async def remove(self) -> None:
        """Leave discovery for good: the instance and the model card."""
        await self.withdraw()
        if not self._helps_others:
            await self._remove_card()

    @property
    def _helps_others(self) -> bool:
        return self._card.endpoint_types == () and self._card.is_listed

    async def _remove_card(self) -> None:
        if self._has_card:
            self._has_card = not await _attempt("remove the model", self._unregister())

    async def serve(self, handler: Any, health_check: dict[str, Any]) -> None:
        """Serve until the runtime shuts down."""
        await self._endpoint.serve_endpoint(
            handler,
            graceful_shutdown=True,
            metrics_labels=[("model", self.names[0])],
            # With a payload the runtime would answer /health from its own probe alone, ignoring ours.
            health_check_payload=health_check if self._options.runtime_health_check else None,
        )


async def _attempt(what: str, step: Awaitable[None]) -> bool:
    """Return whether it worked. Discovery may be down or have lost us; that must not end a worker."""
    try:
        async with asyncio.timeout(DISCOVERY_SECONDS):
            with of_runtime():
                await step
    except (RuntimeFailed, TimeoutError) as exc:
        logger.warning("could not %s: %s", what, str(exc) or f"no answer within {DISCOVERY_SECONDS:g} s")
        return False
    return True
