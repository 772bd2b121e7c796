"""Defines the protocol between a worker and its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.job import (
        Adapter,
        AnswerParser,
        Embeds,
        EngineFacts,
        Job,
        Media,
        MediaPrompt,
        PooledPrompt,
        TextOptions,
    )
    from dynamo_vllm.wire_openai import ChatBody


class LoadFigures(NamedTuple):
    """Describes how full one data-parallel rank is after one step of its scheduler.

    It is a tuple because the engine creates one per step, and a frozen dataclass takes three times as long.
    """

    rank: int
    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int = 0
    """This figure and the next two count from the start of the engine."""
    prefix_queries: int = 0
    """Counts the prompt tokens that the engine looked up in the prefix cache."""
    prefix_hits: int = 0


OnLoad = Callable[[LoadFigures], None]
OnPhase = Callable[[str], None]
"""Is called at each phase of a long start: importing, loading, …"""
FrameChooser = tuple[str, Callable[[int, float], list[int]]]
"""Names a method of sampling video frames, and has its function: (frames, frames per second) → indices."""
Sink = Callable[[Output], None]
"""Receives the outputs of one job as they arrive; an exception from it ends the job."""


class Counting:
    """Switches whether an engine's work counts in the metrics that operators read."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leaves out the worker's own jobs, such as warm-up requests."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


@dataclass(frozen=True, slots=True)
class Sleep:
    """Frees device memory: level 1 moves the weights to host memory, level 2 drops them.

    No job may be running.
    """

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends a sleep of any level; after level 2 the adapters must be loaded again."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Stops computing until `Resume`; running jobs keep their state."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Continues where `Pause` stopped."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Empties caches of these kinds: prefix, multimodal, encoder."""

    kinds: frozenset[str]
    with_tiers: bool = True
    """Whether the prefix cache's tiers in host memory and on disk are emptied too."""


@dataclass(frozen=True, slots=True)
class AddAdapter:
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class RemoveAdapter:
    adapter: Adapter


@dataclass(frozen=True, slots=True)
class StartProfile:
    prefix: str | None = None


@dataclass(frozen=True, slots=True)
class StopProfile:
    pass


EngineOp = (
    Sleep | Wake | Pause | Resume | ResetCache | AddAdapter | RemoveAdapter | StartProfile | StopProfile
)


class Renderer(Protocol):
    """Tokenises text, and creates parsers for generated text (text mode)."""

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]: ...

    async def render_text(self, prompt: str) -> list[int]: ...

    def answer_parser(self, body: ChatBody, template_kwargs: Mapping[str, object]) -> AnswerParser | None:
        """Returns a parser for reasoning and tool calls, or None if answers are only text.

        Raises InvalidRequest for a request that the parsers do not support.
        """


class Tokens(Protocol):
    """Converts between text and token ids as the model does, for clients that ask for it."""

    async def of_text(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    async def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        *,
        add_special_tokens: bool,
    ) -> list[int]:
        """`options` has `template` and `kwargs`, as in `Renderer.render_chat`."""

    async def text(self, ids: Sequence[int]) -> str: ...

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Returns what the vocabulary has for each id."""


class PoolingPrompts(Protocol):
    """Creates the prompts of a pooling model. All raise InvalidRequest, with the number of the item."""

    async def of_texts(self, texts: Sequence[str], options: TextOptions) -> list[PooledPrompt]: ...

    def of_ids(self, prompts: Sequence[Sequence[int]], options: TextOptions) -> list[PooledPrompt]:
        """Shortens token ids as texts are shortened."""

    async def of_pairs(self, pairs: Sequence[tuple[str, str]], options: TextOptions) -> list[PooledPrompt]:
        """Puts the two texts of each pair into one prompt, with the model's template for it."""

    async def of_chat(self, messages: Sequence[Mapping[str, Any]], options: TextOptions) -> PooledPrompt: ...


class Speech(Protocol):
    """Prepares speech for a model that writes it down."""

    async def hint(self, text: str) -> list[int]:
        """Returns the tokens of the text before the speech: its end, if it is too long.

        They are empty for a model that takes no such text.
        """

    def prompt(self, task: str, language: str | None, hint: Sequence[int], *, timestamps: bool) -> list[int]:
        """Returns the decoder's prompt; without a language, one of the same length."""

    async def windows(self, samples: Any, rate: int) -> list[tuple[int, int]]:
        """Returns the parts that the model hears one by one, at least one, without those that are silent."""

    def silence(self) -> tuple[Any, int]:
        """Returns the shortest useful sound: its samples and their rate."""


class EmbedsReader(Protocol):
    """Reads prompt embeddings."""

    async def read(self, text: str) -> Embeds:
        """Decodes and checks a prompt; raises InvalidRequest for one that could crash the engine."""

    def smallest(self) -> str:
        """Returns the shortest valid prompt, encoded as a client would send it."""


class MediaProcessor(Protocol):
    """Puts images, video and audio into prompts."""

    def frame_chooser(self) -> FrameChooser | None:
        """Returns how the model samples video frames; None if unknown, and the worker refuses videos."""

    def placeholders(self) -> Mapping[str, Sequence[int]]:
        """Returns the shortest prompt with one placeholder, for each kind of media the model accepts."""

    async def process(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Replaces each placeholder in the prompt by the tokens of its media item.

        Raises InvalidRequest for media that the model does not accept.
        """


class EncodedMedia(Protocol):
    """Reads media that an encode worker has encoded."""

    async def read(self, name: str) -> object:
        """Returns the encoder output for `job.Media.data`; raises encoder_cache.folder.Unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigures:
    """Describes one tier of KV caches behind the engine's own cache; all but the size since the start."""

    tier: str
    """host or disk."""
    bytes: int
    used_bytes: int | None
    """None as long as no request has run."""
    hit_tokens: int | None
    """Counts the prompt tokens that the tier had; None if the engine cannot tell tiers apart."""
    read_bytes: int
    read_seconds: float
    written_bytes: int
    written_seconds: float
    is_paused: bool = False
    """True while a disk has failed or is full; prompts are then computed, or nothing more is stored."""


@dataclass(frozen=True, slots=True)
class TierProof:
    """Tells whether one rank has loaded a prompt from its tiers, and whether the answer was as before."""

    rank: int
    prompt_tokens: int
    tier_tokens: int
    is_same: bool


class Tiers(Protocol):
    """Knows the tiers of KV caches behind an engine's own cache."""

    sizes: Mapping[str, int]
    """The bytes of each tier, host or disk, over all ranks."""

    def figures(self) -> list[TierFigures]:
        """Returns the figures of each tier, over all ranks."""

    async def prove(self, rank: int) -> TierProof:
        """Computes a short prompt, then loads it from the tiers. Clients keep their caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Holds what an engine can do beyond generating from tokens; None for what it cannot."""

    renderer: Renderer | None = None
    tokens: Tokens | None = None
    pooling: PoolingPrompts | None = None
    speech: Speech | None = None
    embeds: EmbedsReader | None = None
    media: MediaProcessor | None = None
    encoded: EncodedMedia | None = None
    tiers: Tiers | None = None
    count_tokens: Callable[[str], int] | None = None
    """Counts the tokens of a text as the diffusion stage's text encoder does."""


class Engine(Protocol):
    """Describes a running engine, as a launcher returns it: ready to generate."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def parts(self) -> EngineParts: ...

    @property
    def counting(self) -> Counting: ...

    async def stream(self, job: Job, sink: Sink) -> None:
        """Passes every output to the sink and returns after the last.

        If the sink raises, the engine aborts the job and this call raises too.
        """

    async def abort(self, job_id: str) -> None:
        """Aborts a job. Idempotent; ignores unknown ids."""

    async def control(self, op: EngineOp) -> int | None:
        """Executes one operation.

        Returns the bytes of device memory that `Sleep` freed, if that is known. Raises AdapterRefused,
        WrongState, EngineRequestFailed or EngineDead.
        """

    async def check_health(self) -> None:
        """Raises EngineDead if the engine has ended. A hung engine passes: only a job shows a hang."""

    def outputs_seen(self) -> Mapping[int, int]:
        """Returns a counter per rank that grows with every output.

        A counter that stays the same while jobs wait means a hang.
        """

    async def vitals(self) -> Mapping[int, Vitals]:
        """Returns what the processes of each rank are doing, without ranks for which that is unknown."""

    def metrics_text(self) -> str:
        """Returns the engine's own series in the Prometheus text format."""

    async def close(self) -> None:
        """Stops the engine. Idempotent."""


Launcher = Callable[[OnLoad, OnPhase], Awaitable[Engine]]
"""Starts an engine. If it raises or is cancelled, it leaves no process of the engine behind."""
