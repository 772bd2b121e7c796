"""Options of `size`: a model, GPUs, and how an engine would use them."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config.build import opt

QUANTISATIONS = ("none", "fp8", "fp8-block", "int8", "int4", "mxfp4", "nvfp4", "bnb4", "bnb8")
DTYPES = ("bfloat16", "float16", "float32")
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOptions:
    """A model, and the GPUs it must fit on."""

    model: str | None = opt(
        None,
        "size",
        "config.json of the model, its folder, or a hub id in this machine's cache.",
        env="DYN_VLLM_SIZE_MODEL",
        metavar="MODEL",
    )
    gpus: str | None = opt(
        None,
        "size",
        "Available GPUs: 8xH200, or 8xNAME:GIB for an unknown type.",
        env="DYN_VLLM_SIZE_GPUS",
        metavar="GPUS",
    )
    brief: bool = opt(False, "size", "Leave out the model's parts.", env="DYN_VLLM_SIZE_BRIEF")
    json: bool = opt(False, "size", "Print JSON for other programs.", env="DYN_VLLM_SIZE_JSON")
    tensor_parallel_size: int | None = opt(
        None,
        "layout",
        "Shards of each layer.",
        env="DYN_VLLM_SIZE_TP",
        flags=("--tensor-parallel-size", "--tp"),
        metavar="N",
    )
    pipeline_parallel_size: int | None = opt(
        None,
        "layout",
        "Stages of layers.",
        env="DYN_VLLM_SIZE_PP",
        flags=("--pipeline-parallel-size", "--pp"),
        metavar="N",
    )
    data_parallel_size: int | None = opt(
        None,
        "layout",
        "Ranks that share the experts of a model; each has its own copy of the rest.",
        env="DYN_VLLM_SIZE_DP",
        flags=("--data-parallel-size", "--dp"),
        metavar="N",
    )
    enable_expert_parallel: bool = opt(
        False,
        "layout",
        "Whole experts on each GPU instead of slices of all.",
        env="DYN_VLLM_SIZE_EP",
        flags=("--enable-expert-parallel", "--ep"),
    )
    nodes: int = opt(
        1, "layout", "Machines over which the GPUs are spread evenly.", env="DYN_VLLM_SIZE_NODES", metavar="N"
    )
    dtype: str | None = opt(
        None, "engine", "Dtype of the model (default: its own).", env="DYN_VLLM_SIZE_DTYPE", choices=DTYPES
    )
    quantization: str | None = opt(
        None,
        "engine",
        "Quantisation of the linear layers (default: as config.json says).",
        env="DYN_VLLM_SIZE_QUANTIZATION",
        choices=QUANTISATIONS,
    )
    kv_cache_dtype: str = opt(
        "auto",
        "engine",
        "Dtype of the KV cache; auto is the model's.",
        env="DYN_VLLM_SIZE_KV_CACHE_DTYPE",
        choices=CACHE_DTYPES,
    )
    gpu_memory_utilization: float = opt(
        0.92,
        "engine",
        "Share of each GPU that the engine may use.",
        env="DYN_VLLM_SIZE_GPU_MEMORY_UTILIZATION",
        metavar="PART",
    )
    max_model_len: int | None = opt(
        None,
        "engine",
        "Longest request, prompt and answer (default: the model's).",
        env="DYN_VLLM_SIZE_MAX_MODEL_LEN",
        metavar="TOKENS",
    )
    max_num_batched_tokens: int | None = opt(
        None,
        "engine",
        "Tokens of one step (default: vLLM's for the GPU).",
        env="DYN_VLLM_SIZE_MAX_NUM_BATCHED_TOKENS",
        metavar="TOKENS",
    )
    max_num_seqs: int | None = opt(
        None,
        "engine",
        "Requests of one step (default: vLLM's for the GPU).",
        env="DYN_VLLM_SIZE_MAX_NUM_SEQS",
        metavar="N",
    )
    enforce_eager: bool = opt(
        False, "engine", "Compute without CUDA graphs.", env="DYN_VLLM_SIZE_ENFORCE_EAGER"
    )
    hybrid_cache: bool = opt(
        True,
        "engine",
        "Count all tokens of layers with a sliding window, as an engine does whose KV connector does not "
        "support windows; the variable takes 0.",
        env="DYN_VLLM_SIZE_HYBRID_CACHE",
        flags=("--no-hybrid-cache",),
    )
    reserve_gib: float | None = opt(
        None,
        "engine",
        "Memory that each GPU needs besides weights and caches (default: an estimate).",
        env="DYN_VLLM_SIZE_RESERVE_GIB",
        metavar="GIB",
    )
    kv_offload_gb: float | None = opt(
        None,
        "tiers",
        "Host memory in GB for KV caches that leave an engine: the output says how many tokens it holds.",
        env="DYN_VLLM_SIZE_KV_OFFLOAD_GB",
        metavar="GB",
    )
    kv_offload_disk: str | None = opt(
        None,
        "tiers",
        "The same for disk space; a folder before it, as a worker takes it, is ignored.",
        env="DYN_VLLM_SIZE_KV_OFFLOAD_DISK",
        metavar="[PATH:]GB",
    )
    concurrency: int | None = opt(
        None,
        "load",
        "Requests of average length that must fit at once.",
        env="DYN_VLLM_SIZE_CONCURRENCY",
        metavar="N",
    )
    average_len: int = opt(
        4096,
        "load",
        "Tokens of an average request, prompt and answer.",
        env="DYN_VLLM_SIZE_AVERAGE_LEN",
        metavar="TOKENS",
    )
