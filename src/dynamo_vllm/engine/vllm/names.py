"""Declares the parts of vLLM's classes that we use, for the type checker, which does not follow vLLM.

`tests/contract/test_vllm_names.py` compares these names and parameters with the installed vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
    from concurrent.futures import Executor

    import torch
    from zmq.asyncio import Socket


class EngineArgs(Protocol):
    """AsyncEngineArgs."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str
    disable_log_stats: bool
    enable_log_requests: bool

    def create_engine_config(self, usage_context: object, headless: bool) -> Config: ...


class MultimodalConfig(Protocol):
    mm_encoder_attn_dtype: object
    mm_processor_kwargs: dict[str, Any] | None


class PoolerConfig(Protocol):
    max_embed_len: int | None
    enable_chunked_processing: bool | None


class ModelConfig(Protocol):
    model: str
    runner_type: str
    pooler_config: PoolerConfig | None
    tokenizer: str
    revision: str | None
    dtype: torch.dtype
    quantization: str | None
    hf_config: Any
    """A configuration of transformers; each model family has its own fields."""
    hf_text_config: Any
    """The part of it for the language model."""
    hf_overrides: object
    max_model_len: int
    enable_prompt_embeds: bool
    enable_sleep_mode: bool
    skip_tokenizer_init: bool
    multimodal_config: MultimodalConfig | None

    encoder_config: dict[str, Any] | None

    @property
    def is_moe(self) -> bool: ...

    @property
    def is_matryoshka(self) -> bool: ...

    @property
    def matryoshka_dimensions(self) -> list[int] | None: ...

    @property
    def embedding_size(self) -> int: ...

    @property
    def use_mla(self) -> bool: ...

    @property
    def is_hybrid(self) -> bool: ...

    def get_sliding_window(self) -> int | None: ...

    def get_pooling_task(self, supported_tasks: Sequence[str]) -> str | None: ...

    def get_vocab_size(self) -> int: ...

    def get_inputs_embeds_size(self) -> int: ...

    def get_head_size(self) -> int: ...

    def get_total_num_kv_heads(self) -> int: ...

    def get_total_num_hidden_layers(self) -> int: ...

    def try_get_generation_config(self) -> dict[str, Any]: ...

    def get_diff_sampling_param(self) -> dict[str, object]: ...


class CacheConfig(Protocol):
    block_size: int
    num_gpu_blocks: int | None
    cache_dtype: str
    enable_prefix_caching: bool


class SchedulerConfig(Protocol):
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    disable_hybrid_kv_cache_manager: bool | None


class ParallelConfig(Protocol):
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    data_parallel_size_local: int
    data_parallel_rank: int
    data_parallel_master_ip: str
    data_parallel_rpc_port: int
    data_parallel_external_lb: bool
    distributed_executor_backend: object
    numa_bind: bool

    @property
    def local_world_size(self) -> int: ...


class LoraConfig(Protocol):
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None


class KvTransferConfig(Protocol):
    kv_connector: str | None
    kv_connector_extra_config: dict[str, Any]


class KvEventsConfig(Protocol):
    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    topic: str


class SpeculativeConfig(Protocol):
    method: str | None
    model: str | None


class CompilationConfig(Protocol):
    mode: object
    static_forward_context: dict[str, Any]
    """The layers that a worker of vLLM has created, by name."""


class ProfilerConfig(Protocol):
    profiler: str | None
    torch_profiler_dir: str
    proton_profiler_dir: str


class StructuredOutputsConfig(Protocol):
    backend: str


class Config(Protocol):
    """VllmConfig."""

    model_config: ModelConfig
    cache_config: CacheConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    compilation_config: CompilationConfig
    profiler_config: ProfilerConfig
    structured_outputs_config: StructuredOutputsConfig
    lora_config: LoraConfig | None
    kv_transfer_config: KvTransferConfig | None
    kv_events_config: KvEventsConfig | None
    ec_transfer_config: object
    speculative_config: SpeculativeConfig | None
    additional_config: object


class Renderer(Protocol):
    """BaseRenderer."""

    model_config: ModelConfig
    mm_processor: Any
    """The model's multimodal processor; None for a text-only model."""
    _executor: Executor
    """Its thread for tokenising."""

    @property
    def default_chat_tok_params(self) -> Any: ...

    def get_tokenizer(self) -> Any: ...

    async def render_messages_async(self, messages: list[Any], params: Any) -> tuple[Any, Any]: ...

    async def tokenize_prompt_async(self, prompt: Any, params: Any) -> Mapping[str, Any]: ...

    async def render_cmpl_async(self, prompts: Sequence[Mapping[str, Any]]) -> Sequence[dict[str, Any]]: ...


class Resources(Protocol):
    """BackgroundResources."""

    engine_manager: object
    """None, or another class if Ray runs the engine."""
    output_socket: Socket


class EngineCore(Protocol):
    """AsyncMPClient: this process's connection to the engine cores."""

    engine_ranks_managed: list[int]
    resources: Resources

    async def add_request_async(self, request: Request) -> None: ...


class Request(Protocol):
    """EngineCoreRequest."""

    request_id: str
    prompt_token_ids: list[int] | None
    pooling_params: Any


class CachedRequest(Protocol):
    """Request: of the scheduler."""

    lora_request: object
    cache_salt: str | None
    mm_features: Sequence[object]
    prompt_embeds: torch.Tensor | None


class BlockStored(Protocol):
    block_size: int
    token_ids: list[int]
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None


class OffloadingGroup(Protocol):
    """OffloadingGroupConfig."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class OffloadingCache(Protocol):
    """OffloadingCacheConfig."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


class OffloadingModel(Protocol):
    """OffloadingModelConfig."""

    dtype: str


class OffloadingParallel(Protocol):
    """OffloadingParallelConfig."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    rank: int
    world_size: int
    data_parallel_index: int
    data_parallel_rank_local: int | None


class OffloadingConfig(Protocol):
    """Is what a tier may know of its engine."""

    groups: Sequence[OffloadingGroup]
    model: OffloadingModel
    cache: OffloadingCache
    parallel: OffloadingParallel
    extra_config: Mapping[str, Any]
    engine_id: str
    enable_kv_cache_events: bool


class OffloadingEvents(Protocol):
    """OffloadingKVEventsConfig."""

    enable_kv_cache_events: bool


class OffloadingSpec(Protocol):
    """TieringOffloadingSpec."""

    config: OffloadingConfig
    kv_events_config: OffloadingEvents
    secondary_tier_configs: list[dict[str, Any]]
    blocks_per_chunk: int
    num_chunks: int
    kv_bytes_per_chunk: int
    cpu_page_size_per_worker: int
    _engine_id: str
    _scheduler_mmap: OffloadRegion | None


class OffloadRegion(Protocol):
    """SharedOffloadRegion: the memory of the host tier."""

    mmap_path: str
    _creator: bool

    def create_next_worker_view(self, tensor_page_size: int) -> torch.Tensor: ...

    def cleanup(self) -> None: ...


class TransferJob(Protocol):
    """A job of the tiering manager."""

    job_id: int
    keys: Collection[bytes]
    chunk_ids: Any
    """A numpy array of rows of the host tier."""
    req_context: Any


class InputProcessor(Protocol):
    def process_inputs(
        self,
        request_id: str,
        prompt: Mapping[str, object],
        params: object,
        supported_tasks: tuple[object, ...],
        *,
        lora_request: object,
        trace_headers: Mapping[str, str] | None,
        priority: int,
        data_parallel_rank: int | None,
    ) -> Request: ...

    def assign_request_id(self, request: Request) -> None: ...


class OutputProcessor(Protocol):
    process_outputs: Callable[..., Any]
    request_states: dict[str, Any]
    stream_interval: int

    def add_request(
        self, request: Request, prompt: str | None, parent_req: object, request_index: int, queue: object
    ) -> None: ...


class Llm(Protocol):
    """AsyncLLM."""

    vllm_config: Config
    renderer: Renderer
    engine_core: EngineCore
    input_processor: InputProcessor
    output_processor: OutputProcessor
    output_handler: asyncio.Task[None] | None

    @property
    def errored(self) -> bool: ...

    @property
    def dead_error(self) -> BaseException: ...

    def generate(
        self,
        prompt: Mapping[str, Any],
        sampling_params: Any,
        request_id: str,
        *,
        lora_request: Any,
        trace_headers: Mapping[str, str] | None,
        priority: int,
        data_parallel_rank: int | None,
    ) -> AsyncGenerator[Any, None]: ...

    async def abort(self, request_id: str, internal: bool = False) -> None: ...

    async def check_health(self) -> None: ...

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None: ...

    async def get_supported_tasks(self) -> tuple[str, ...]: ...

    def _run_output_handler(self) -> None: ...

    async def sleep(self, level: int = 1, mode: str = "abort") -> None: ...

    async def wake_up(self, tags: list[str] | None = None) -> None: ...

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...

    async def resume_generation(self) -> None: ...

    async def collective_rpc(self, method: str) -> list[Any]: ...

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool: ...

    async def reset_mm_cache(self) -> None: ...

    async def reset_encoder_cache(self) -> None: ...

    async def add_lora(self, lora_request: object) -> bool: ...

    async def remove_lora(self, lora_id: int) -> bool: ...

    async def start_profile(self, profile_prefix: str | None = None) -> None: ...

    async def stop_profile(self) -> None: ...

    def shutdown(self, timeout: float | None = None) -> None: ...
