"""Options of a worker for media: who encodes them, where they may come from, and their limits."""

from __future__ import annotations

from dataclasses import dataclass

from dynamo_vllm.config import addresses
from dynamo_vllm.config.build import opt
from dynamo_vllm.config.options.media_reach import MediaReachOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaOptions(MediaReachOptions):
    """A process that accepts images, video and audio too."""

    enable_multimodal: bool = opt(
        False,
        "multimodal",
        "Accept images, video and audio, if the model does (docs/multimodal.md).",
        env="DYN_VLLM_ENABLE_MULTIMODAL",
    )
    multimodal_worker: bool = opt(
        False,
        "multimodal",
        "Older name of --enable-multimodal with --route-to-encoder.",
        env="DYN_VLLM_MULTIMODAL_WORKER",
    )
    multimodal_encode_worker: bool = opt(
        False,
        "multimodal",
        "Older name of --disaggregation-mode encode.",
        env="DYN_VLLM_MULTIMODAL_ENCODE_WORKER",
    )
    multimodal_decode_worker: bool = opt(
        False,
        "multimodal",
        "Older name of --disaggregation-mode decode.",
        env="DYN_VLLM_MULTIMODAL_DECODE_WORKER",
    )
    multimodal_encode_prefill_worker: bool = opt(
        False,
        "multimodal",
        "Older name of --disaggregation-mode prefill: a prefill worker has its own vision encoder.",
        env="DYN_VLLM_MULTIMODAL_ENCODE_PREFILL_WORKER",
    )
    multimodal_processor: bool = opt(
        False,
        "multimodal",
        "Known and refused: the frontend replaces this processor; start dynamo-vllm frontend.",
        env="DYN_VLLM_MULTIMODAL_PROCESSOR",
    )
    ec_processor: bool = opt(
        False,
        "multimodal",
        "Known and refused, like --multimodal-processor: start dynamo-vllm frontend.",
        env="DYN_VLLM_EC_PROCESSOR",
    )
    route_to_encoder: bool = opt(
        False,
        "multimodal",
        "Let encode workers encode media; the worker encodes them itself if none answers.",
        env="DYN_ROUTE_TO_ENCODER",
        older_envs=("DYN_VLLM_ROUTE_TO_ENCODER",),
    )
    vllm_native_encoder_worker: bool = opt(
        False,
        "multimodal",
        "Older name of --disaggregation-mode encode.",
        env="DYN_VLLM_NATIVE_ENCODER_WORKER",
    )
    ec_connector_backend: str | None = opt(
        None,
        "multimodal",
        "Encoder cache connector: ECExampleConnector, in whose place ours is used; others are not tested.",
        env="DYN_VLLM_EC_CONNECTOR_BACKEND",
        metavar="NAME",
    )
    ec_storage_path: str | None = opt(
        None,
        "multimodal",
        "Folder that encode workers share with the workers they encode for.",
        env="DYN_VLLM_EC_STORAGE_PATH",
        metavar="FOLDER",
    )
    ec_storage_gb: float = opt(
        4.0,
        "multimodal",
        "Size limit of that folder, in GB; encode workers remove the least recently used files.",
        env="DYN_VLLM_EC_STORAGE_GB",
        metavar="GB",
    )
    encoder_transfer: str = opt(
        "file",
        "multimodal",
        "How a worker gets embeddings: from the shared folder, or over NIXL into its own folder.",
        env="DYN_VLLM_ENCODER_TRANSFER",
        choices=("file", "nixl"),
    )
    encoder_component: str = opt(
        "encoder",
        "multimodal",
        "Component of the encode workers, or their whole address dyn://namespace.component.endpoint.",
        env="DYN_VLLM_ENCODER_COMPONENT",
        metavar="NAME",
    )
    encoder_seconds: float = opt(
        10.0,
        "multimodal",
        "How long encode workers may take, without loading media, before a worker encodes them itself.",
        env="DYN_VLLM_ENCODER_SECONDS",
        metavar="SECONDS",
    )
    ec_extra_config: str | None = opt(
        None,
        "multimodal",
        "Connector settings: shared_storage_path is --ec-storage-path; more only for other connectors.",
        env="DYN_VLLM_EC_EXTRA_CONFIG",
        metavar="JSON",
    )
    ec_consumer_mode: bool = opt(
        False,
        "multimodal",
        "Like --route-to-encoder, but the engine itself reads the embeddings from the folder.",
        env="DYN_VLLM_EC_CONSUMER_MODE",
    )
    frontend_decoding: bool = opt(
        False,
        "multimodal",
        "Let the frontend fetch and decode images; the worker reads the pixels over NIXL.",
        env="DYN_VLLM_FRONTEND_DECODING",
    )
    mm_prompt_template: str | None = opt(
        None,
        "multimodal",
        "Prompt of a chat with media, for a model whose chat template has no place for them, such as "
        "'USER: <image>\\n<prompt> ASSISTANT:'.",
        env="DYN_VLLM_MM_PROMPT_TEMPLATE",
        metavar="TEXT",
    )
    media_max_images: int = opt(
        16, "multimodal", "Most images in one request.", env="DYN_VLLM_MEDIA_MAX_IMAGES", metavar="N"
    )
    media_max_videos: int = opt(
        2, "multimodal", "Most videos in one request.", env="DYN_VLLM_MEDIA_MAX_VIDEOS", metavar="N"
    )
    media_max_audios: int = opt(
        4, "multimodal", "Most audio parts in one request.", env="DYN_VLLM_MEDIA_MAX_AUDIOS", metavar="N"
    )
    media_max_mb: float = opt(
        64.0, "multimodal", "Largest encoded item, in MB.", env="DYN_VLLM_MEDIA_MAX_MB", metavar="MB"
    )
    media_max_megapixels: float = opt(
        64.0,
        "multimodal",
        "Most pixels of an image or of a video frame, in millions.",
        env="DYN_VLLM_MEDIA_MAX_MEGAPIXELS",
        metavar="N",
    )
    media_max_frames: int = opt(
        768, "multimodal", "Most frames selected from a video.", env="DYN_VLLM_MEDIA_MAX_FRAMES", metavar="N"
    )
    media_max_video_megapixels: float = opt(
        512.0,
        "multimodal",
        "Most pixels of all selected frames of a video, in millions; each pixel takes three bytes.",
        env="DYN_VLLM_MEDIA_MAX_VIDEO_MEGAPIXELS",
        metavar="N",
    )
    media_max_seconds: float = opt(
        600.0,
        "multimodal",
        "Longest video or audio.",
        env="DYN_VLLM_MEDIA_MAX_SECONDS",
        metavar="SECONDS",
    )
    media_timeout_seconds: float = opt(
        20.0,
        "multimodal",
        "Time to fetch and decode one item.",
        env="DYN_VLLM_MEDIA_TIMEOUT_SECONDS",
        metavar="SECONDS",
    )
    media_queue_seconds: float = opt(
        60.0,
        "multimodal",
        "How long an item may wait in a queue before the request is refused with 503.",
        env="DYN_VLLM_MEDIA_QUEUE_SECONDS",
        metavar="SECONDS",
    )
    media_redirects: int = opt(
        3, "multimodal", "Most redirects to follow.", env="DYN_VLLM_MEDIA_REDIRECTS", metavar="N"
    )
    media_folder: str | None = opt(
        None,
        "multimodal",
        "Folder from which file: URLs may be read (default: none).",
        env="DYN_VLLM_MEDIA_FOLDER",
        flags=("--media-folder", "--allowed-local-media-path"),
        metavar="FOLDER",
    )
    media_cache_mb: float = opt(
        512.0,
        "multimodal",
        "Memory for the cache of decoded media, in MB; 0 turns it off.",
        env="DYN_VLLM_MEDIA_CACHE_MB",
        metavar="MB",
    )
    media_memory_mb: float = opt(
        4096.0,
        "multimodal",
        "Memory for media of requests that the engine has not started, in MB; further requests wait.",
        env="DYN_VLLM_MEDIA_MEMORY_MB",
        metavar="MB",
    )
    media_at_once: int = opt(
        64,
        "multimodal",
        "Most items fetched and decoded at a time; one request gets an eighth, one host a quarter of them.",
        env="DYN_VLLM_MEDIA_AT_ONCE",
        metavar="N",
    )
    media_threads: int = opt(
        4,
        "multimodal",
        "Threads that decode media; videos and audio may use half of them.",
        env="DYN_VLLM_MEDIA_THREADS",
        metavar="N",
    )

    @property
    def encoders_address(self) -> str:
        """Return namespace.component.endpoint of the encode workers."""
        named = self.encoder_component
        return addresses.whole(named) or f"{self.namespace}.{named}.generate"
