"""What we ask an engine for and what it answers; no vLLM types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Terms = dict[str, str | int]
"""What two engines must share before one can read the other's KV cache, by name."""
GUIDE_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


@dataclass(frozen=True, slots=True)
class Guide:
    """One constraint on the generated text; exactly one field is set."""

    json: str | Mapping[str, Any] | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    backend: str | None = None
    """What compiles it in the engine; the guide checker sets it, clients cannot."""

    @property
    def parameter(self) -> str:
        """The request's field that set the constraint, for messages."""
        kind = next(name for name in GUIDE_KINDS if getattr(self, name) is not None)
        return {"json": "guided_json or response_format", "json_object": "response_format"}.get(
            kind, f"guided_{kind}"
        )


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A parsed piece of a choice's text."""

    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    """In the form of OpenAI's stream chunks."""


class ChoiceParser(Protocol):
    """Parses one choice of an answer while it is generated."""

    def part(self, output: Output) -> AnswerPart: ...


class AnswerParser(Protocol):
    """Finds reasoning and tool calls in the answer to one request."""

    @property
    def guide(self) -> Guide | None:
        """The constraint that forces the tool calls that the client asks for."""

    @property
    def reads_special_tokens(self) -> bool:
        """Whether the text must contain special tokens."""

    def choice(self, prompt: Sequence[int]) -> ChoiceParser: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How to choose tokens and when to stop. None means the engine's default."""

    max_tokens: int
    min_tokens: int = 0
    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    guide: Guide | None = None
    max_thinking_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    detokenize: bool = False

    @property
    def gives_only_tokens(self) -> bool:
        """Return whether an output is token ids and nothing else, of the only choice."""
        return (
            self.n == 1
            and self.logprobs is None
            and self.prompt_logprobs is None
            and not self.detokenize
            and not self.stop
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter as an engine knows it."""

    name: str
    """The name that clients use."""
    id: int
    """One per name and content; an engine that sees an id again serves the first content it had."""
    path: str
    engine_name: str
    """The engine's name for its KV caches: the name and the content."""
    content: str = ""
    """Hash of the files: equal in all workers that loaded the same adapter."""


@dataclass(frozen=True, slots=True)
class Embeds:
    """A prompt as vectors, read and checked; only the engine reads the tensor."""

    rows: int
    tensor: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """What a pipeline must generate: images, videos or audio. None means the pipeline's default."""

    prompt: str
    seed: int
    kind: str = "image"
    """image, video or audio."""
    n: int = 1
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    """Of a video."""
    fps: int | None = None
    steps: int | None = None
    guidance: float | None = None
    negative_prompt: str | None = None
    format: str = "png"
    """png, jpeg or webp; mp4 for a video, wav for audio."""


@dataclass(frozen=True, slots=True)
class Media:
    """One image, video or audio of a prompt."""

    kind: str
    """image, video or audio."""
    data: Any
    """An image (RGB), (frames, metadata) of a video, (samples, rate) of audio; or the output of an encode
    worker, in a form that the engine knows."""
    name: str
    """The engine's key for everything computed from it: the same name means the same content."""


@dataclass(slots=True)
class MediaPrompt:
    """A prompt with its media, as an engine prepared it."""

    tokens: Sequence[int]
    """With the placeholder tokens of all media, as many as each takes in the model's context."""
    plain: Sequence[int]
    """The original prompt: one placeholder for each medium."""
    media: Sequence[Media]
    inner: Any
    """Data that only the engine reads."""
    size: int = 0
    """Bytes of `inner`."""
    release: Callable[[], None] = lambda: None
    """Reports to `MediaMemory` that the bytes are not held any more."""

    def drop_media(self) -> None:
        """Free the memory of the media once the engine has them: an answer may take long."""
        self.media, self.inner = (), None
        self.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How texts become the prompts of a pooling model."""

    special_tokens: bool = True
    keep: int | None = None
    """How many tokens a longer text keeps; -1 keeps what the model takes, None refuses a longer text."""
    keep_end: bool | None = None
    """Whether a longer text keeps its end, not its beginning; None is the tokenizer's own way."""
    query_tokens: int = 0
    """How many tokens of the first text of a pair are kept; 0 keeps all."""
    document_tokens: int = 0
    """The same of the second."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """For the template of a pair or a chat, such as an instruction."""


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """One prompt of a pooling job."""

    tokens: Sequence[int]
    second_at: int | None = None
    """Where the second text of a pair begins, for models that mark it in the tokens' types."""
    media: MediaPrompt | None = None
    """With media; `tokens` are then its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingSpec:
    """What a pooling model must compute. None means the model's default."""

    task: str
    """embed, classify, token_embed or token_classify, in vLLM's words."""
    prompts: Sequence[PooledPrompt]
    dimensions: int | None = None
    use_activation: bool | None = None
    pairs: Sequence[tuple[int, int]] = ()
    """Prompts to compare; the answer then has one number for each pair instead of the vectors."""
    values_per_output: int | None = None
    """After about so many numbers the engine sends an output; None sends all in one."""


@dataclass(slots=True, kw_only=True)
class SpeechSpec:
    """What a speech model must write down. The job's sampling is that of each window."""

    samples: Any
    """One channel of floats, full scale 1; only the engine reads it. None when it has."""
    rate: int
    windows: Sequence[tuple[int, int]]
    """The parts that the model hears one by one: the first sample and the one after the last."""
    sound_tokens: int
    """What the sound counts as, in the encoder's positions."""
    task: str = "transcribe"
    """transcribe, or translate into English."""
    language: str | None = None
    """Of the speech; with None the model finds out."""
    hint: Sequence[int] = ()
    """Tokens of a text that comes before the speech, for its style and its names."""
    timestamps: bool = False
    """Whether the answer has segments with their times."""

    def drop_sound(self) -> None:
        """Free the memory of the sound: something may refer to the job until the next garbage collection."""
        self.samples = None


@dataclass(frozen=True, slots=True)
class Job:
    """One request as an engine sees it."""

    id: str
    prompt: Sequence[int]
    sampling: SamplingSpec
    priority: int = 0
    """Smaller is sooner, as in vLLM; a client's hint is the other way round."""
    data_parallel_rank: int | None = None
    cache_salt: str | None = None
    transfer: Mapping[str, Any] | None = None
    """For the engine's KV connector: keep the cache for another engine, or fetch it from one."""
    answer: Output | None = None
    """The answer, if there is nothing to compute; the engine then does not get the job."""
    adapter: Adapter | None = None
    embeds: Embeds | None = None
    """Instead of `prompt`, which then has the same length and no meaning."""
    pipeline: PipelineSpec | None = None
    """Instead of `prompt`, for a pipeline that generates media."""
    pooling: PoolingSpec | None = None
    """Instead of `prompt`, for a pooling model."""
    speech: SpeechSpec | None = None
    """With speech; `prompt` is then the decoder's, the same for each window."""
    media: MediaPrompt | None = None
    """With media; `prompt` is then its tokens."""
    parser: AnswerParser | None = None
    """Parses the generated text; None if the client gets it unchanged, or if the frontend parses."""
    trace_headers: Mapping[str, str] | None = None
    """W3C trace headers: the parent of the engine's span; None if requests are not traced."""

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens that the engine reads."""
        if self.pooling is not None:
            return sum(len(prompt.tokens) for prompt in self.pooling.prompts)
        if self.speech is not None:
            return len(self.prompt) * len(self.speech.windows) + self.speech.sound_tokens
        return len(self.prompt)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate at one position."""

    token_id: int
    logprob: float
    rank: int | None
    text: str | None


@dataclass(frozen=True, slots=True)
class Position:
    """The token chosen at one position and the candidates the engine looked at."""

    chosen: TokenLogprob
    candidates: Sequence[TokenLogprob]


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A generated image, audio or video, as a file."""

    kind: str
    """image, audio or video."""
    type: str
    """Its MIME type."""
    content: bytes


class Vector(Protocol):
    """The numbers of one prompt: one row, or a row for each token. numpy's arrays are such."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def tolist(self) -> list[Any]: ...

    def tobytes(self) -> bytes:
        """Return 32-bit floats in the machine's byte order."""


@dataclass(frozen=True, slots=True)
class SpeechSegment:
    """Some words of a transcript, with their time in seconds from the beginning of the sound."""

    start: float
    end: float
    text: str
    token_ids: Sequence[int]
    mean_logprob: float
    offset: float
    """Where its window begins."""


@dataclass(frozen=True, slots=True)
class SpeechPiece:
    """The next piece of a transcript. The pieces make up the whole text."""

    text: str
    language: str
    segments: Sequence[SpeechSegment] = ()


@dataclass(slots=True)
class Output:
    """The next piece of one choice. `finish` is set once per choice, `finished` once per job."""

    token_ids: Sequence[int]
    index: int = 0
    text: str | None = None
    finish: str | None = None
    stop_reason: int | str | None = None
    finished: bool = False
    cached_tokens: int | None = None
    logprobs: Sequence[Position] | None = None
    prompt_logprobs: Sequence[Position | None] | None = None
    transfer: Mapping[str, Any] | None = None
    """Where another engine finds this job's KV cache."""
    media: Sequence[MediaFile] = ()
    pooled: Sequence[Vector] = ()
    """The results of the next prompts of a pooling job; `index` is the first one's."""
    speech: SpeechPiece | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFacts:
    """What a pooling model computes."""

    task: str
    """What it is for: embed, classify, token_embed or token_classify."""
    tasks: Sequence[str]
    """All that it can compute."""
    dimensions: int = 0
    """Length of an embedding."""
    smaller: Sequence[int] | None = None
    """Lengths that an embedding may be cut to; empty for any, None for a model that does not allow it."""
    labels: Sequence[str | None] = ()
    """Names of the classes."""
    scoring: str | None = None
    """How it scores pairs: cross-encoder, bi-encoder or late-interaction; None if it does not."""
    longest: int = 0
    """Tokens of the longest prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechFacts:
    """What a speech model understands."""

    languages: Sequence[str]
    """Their codes, such as en; a model with one language gets no code in its prompt."""
    window_seconds: float
    """The longest sound that the model hears at once."""
    tokens_per_second: float
    """Positions of the encoder for a second of sound."""
    translates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLimits:
    """What a pipeline can generate."""

    kind: str = "image"
    """image, video or audio."""
    frames: int | None = None
    """Frames of a video if the request gives no number."""
    sample_rate: int | None = None
    """Sample rate of its audio, if the model's files say it."""
    step: int
    """Both sides are multiples of it."""
    max_prompt_tokens: int | None = None
    max_steps: int | None = None
    """Fewer than the model was trained with."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What an engine takes of LoRA adapters."""

    capacity: int
    """How many may be loaded at a time."""
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What an engine says about itself once it can generate."""

    context_length: int
    vocab_size: int
    block_size: int
    total_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    data_parallel_size: int = 1
    data_parallel_start_rank: int = 0
    kv_event_endpoints: Mapping[int, str] = field(default_factory=dict)
    kv_event_topic: str = ""
    bos_token_id: int | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The model's own defaults (generation_config.json) for fields a request leaves out."""
    versions: Mapping[str, str] = field(default_factory=dict)
    rules: Sequence[str] = ()
    terms: Terms = field(default_factory=dict)
    kv_lease_seconds: float = 30
    """How long the engine keeps a KV cache that another engine is to fetch."""
    adapters: AdapterLimits | None = None
    """None where LoRA is off."""
    media: Mapping[str, int] = field(default_factory=dict)
    """How many of each kind of media one prompt may have; empty for a model that takes text only."""
    encoder: str = ""
    """Hash of the vision encoder: equal in engines whose encoders give the same output."""
    sleep_refusal: str | None = None
    """Why this engine must not sleep, with the fix; None where it may."""
    pipeline: PipelineLimits | None = None
    """None if the engine generates text."""
    pooling: PoolingFacts | None = None
    """None if the engine generates."""
    speech: SpeechFacts | None = None
    """None if the engine does not write down speech."""
    builds_lazily: bool = False
    """Whether the first request of each kind is slow because the engine builds something for it."""
    compiles_kernels: bool = False
    """Whether it compiles kernels, for each new shape and setting."""
    profile_folder: str | None = None
    """Where profiles are written; None where the engine records none."""
