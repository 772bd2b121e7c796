"""Implements vLLM's encoder cache connector over a shared folder (`folder`); runs in the engine's processes.

vLLM 0.30 has its own ECExampleConnector. It writes files in place, never removes one, and crashes the engine
if a file is missing or has the wrong shape when it is used. Here a consumer reads and checks a file in the
scheduler, before vLLM decides whether to run the encoder, and sends the tensor to the workers with the step.
If a file cannot be read, the engine encodes the media item itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)

from dynamo_vllm.engine.encoder_cache.folder import FOLDER, MAX_BYTES, Folder, Unusable
from dynamo_vllm.engine.vllm import kv_compatibility

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from dynamo_vllm.engine.vllm.names import ModelConfig

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM configures only loggers below its own in each process
_MAX_PENDING = 4096


def width(model: ModelConfig) -> int:
    """Returns the columns of the encoder output; Qwen3-VL appends deepstack features to the embeddings."""
    vision = getattr(model.hf_config, "vision_config", None)
    more = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    return int(model.get_inputs_embeds_size()) * (1 + more)


@dataclass
class Step(ECConnectorMetadata):  # type: ignore[misc]  # vLLM has no types
    """Is what the scheduler sends to the workers with one step."""

    loaded: dict[str, torch.Tensor] = field(default_factory=dict)
    """For a consumer: the encoder outputs found in the folder."""
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    """For a producer: the metadata of each media item that it will write."""


class FolderConnector(ECConnectorBase):  # type: ignore[misc]  # vLLM has no types
    """Passes encoder outputs between engines through files; a producer writes them, a consumer reads them."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        model, transfer = vllm_config.model_config, vllm_config.ec_transfer_config
        extra = transfer.ec_connector_extra_config
        self._folder = Folder(
            Path(extra[FOLDER], kv_compatibility.encoder(vllm_config)), int(extra[MAX_BYTES])
        )
        self._width, self._dtype = width(model), model.dtype
        self._resolver = PlaceholderMetadataResolver(model)
        self._step = Step()
        self._seen: set[str] = set()
        self._rows: dict[str, int] = {}
        self._users: Counter[str] = Counter()
        self._ready: dict[str, torch.Tensor] = {}
        self._pending: dict[str, dict[str, object]] = {}

    # --- in the scheduler ---------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Records the media items of a request. Never waits.

        vLLM calls this for each request in each step, before the other methods.
        """
        if request.request_id in self._seen:
            return True
        self._seen.add(request.request_id)
        if self.is_producer:
            items = collect_ec_item_metadata(request.mm_features, self._resolver)
            self._step.about |= {name: item["metadata"] for name, item in items.items()}
        else:
            for feature in request.mm_features:
                self._rows[feature.identifier] = feature.mm_position.get_num_embeds()
                self._users[feature.identifier] += 1
        return True

    def has_cache_item(self, identifier: str) -> bool:
        """Returns whether the encoder need not run; vLLM asks if its own encoder cache has no entry.

        A producer need not encode what is already in the folder. vLLM then treats the item as cached, and
        would not write it again after its eviction from the folder; but vLLM's own cache evicts much earlier.
        """
        if self.is_producer:
            return self._folder.has(identifier)
        if identifier not in self._rows:
            return False
        if identifier not in self._ready:
            try:
                self._ready[identifier], _ = self._folder.read(
                    identifier, self._width, self._dtype, self._rows[identifier]
                )
            except Unusable as exc:
                logger.info("media item %s: encoding it here: %s", identifier[-8:], exc)
                return False
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        name = request.mm_features[index].identifier
        if name in self._ready:
            self._step.loaded[name] = self._ready.pop(name)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Step:
        step, self._step = self._step, Step()
        return step

    def request_finished(self, request: Request) -> tuple[bool, None]:
        if request.request_id not in self._seen:
            return False, None
        self._seen.remove(request.request_id)
        for feature in request.mm_features if self.is_consumer else ():
            name = feature.identifier
            self._users[name] -= 1
            if self._users[name] <= 0:
                del self._users[name], self._rows[name]
                self._ready.pop(name, None)
        return False, None

    # --- in the workers -----------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: object) -> None:
        from vllm.platforms import current_platform

        device = current_platform.device_type
        if current_platform.is_cuda_alike():
            device = f"{device}:{current_platform.current_device()}"
        for name, tensor in self._bound.loaded.items():
            if name not in encoder_cache:
                encoder_cache[name] = tensor.to(device)

    def start_save_caches(self, encoder_cache: dict[str, torch.Tensor], **_: object) -> None:
        """Writes again what the engine still has in its cache and the folder no longer has."""
        for name, about in self._bound.about.items():
            if name in encoder_cache:
                if not self._folder.has(name):
                    self._write(name, encoder_cache[name], about)
            else:
                self._pending[name] = about
        while len(self._pending) > _MAX_PENDING:  # left by aborted requests
            del self._pending[next(iter(self._pending))]

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: object) -> None:
        """Writes one encoder output; vLLM calls this when it is encoded, before its request ends."""
        if self.is_producer:
            self._write(mm_hash, encoder_cache[mm_hash], self._pending.pop(mm_hash, {}))

    def _write(self, name: str, tensor: torch.Tensor, about: dict[str, object]) -> None:
        if get_tensor_model_parallel_rank() != 0:  # every rank has the whole output
            return
        try:
            self._folder.write(name, tensor, about)
        except OSError as exc:  # a full disk must not end the engine
            logger.warning("media item %s: cannot write its encoder output: %s", name[-8:], exc)

    @property
    def _bound(self) -> Step:
        step = self._get_connector_metadata()
        assert isinstance(step, Step)
        return step
