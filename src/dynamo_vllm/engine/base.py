"""Defines the protocol between a worker and its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from dynamo_vllm.job import Output

if TYPE_CHECKING:
    from dynamo_vllm.engine.process.activity import Vitals
    from dynamo_vllm.job import Adapter, AnswerParser, Embeds, EngineFacts, Job, Media, MediaPrompt
    from dynamo_vllm.wire_openai import ChatBody


class LoadFigures(NamedTuple):
    """How full one data-parallel rank is, after one step of its scheduler.

    A tuple, because there is one for every step: a frozen dataclass takes three times as long to make.
    """

    rank: int
    running: int
    waiting: int
    kv_usage: float
    generated_tokens: int = 0
    """Since the start, as the next two."""
    prefix_queries: int = 0
    """Prompt tokens that were looked for in the prefix cache."""
    prefix_hits: int = 0


OnLoad = Callable[[LoadFigures], None]
OnPhase = Callable[[str], None]
"""Told about each phase of a long start: importing, loading, …"""
FrameChooser = tuple[str, Callable[[int, float], list[int]]]
"""The name of a way to choose a video's frames, and the way: (frames, frames a second) → indices."""
Sink = Callable[[Output], None]
"""Takes the outputs of one job as they come; one that raises ends the job."""


class Counting:
    """Whether the figures that operators read count what an engine does."""

    def __init__(self) -> None:
        self.is_on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """For jobs of the worker's own."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


@dataclass(frozen=True, slots=True)
class Sleep:
    """Level 1 keeps the weights in host memory, level 2 drops them. Nothing may be running."""

    level: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends a sleep of any level; the adapters are gone after level 2."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Compute nothing until `Resume`; what runs stands still."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on where `Pause` stopped."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget what was computed: prefix, multimodal, encoder."""

    kinds: frozenset[str]


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
    """Turns text into tokens, and reads the text that the engine answers (text mode)."""

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> list[int]: ...

    async def render_text(self, prompt: str) -> list[int]: ...

    def answer_parser(self, body: ChatBody, template_wishes: Mapping[str, object]) -> AnswerParser | None:
        """None where answers are text and nothing else. What parsers cannot take is refused."""


class EmbedsReader(Protocol):
    """Reads prompts that come as vectors."""

    async def read(self, text: str) -> Embeds:
        """Decoded and checked; whatever could hurt the engine is refused with InvalidRequest."""

    def smallest(self) -> str:
        """A prompt as small as may be, as a client would send it."""


class MediaProcessor(Protocol):
    """Puts pictures, video and sound into prompts."""

    def frame_chooser(self) -> FrameChooser | None:
        """How the model's videos are sampled; None where that is not known, and videos are refused."""

    def marks(self) -> Mapping[str, Sequence[int]]:
        """For each kind that the model takes, the smallest prompt with a place for one."""

    async def see(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Makes room for the media where the prompt has their marks.

        What the model cannot take is refused with InvalidRequest.
        """


class EncodedMedia(Protocol):
    """Takes media as an encode worker left them."""

    async def read(self, name: str) -> object:
        """What stands for the medium in `job.Media`; raises encoder_cache.folder.Unusable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine can do beside generating from tokens; None where it cannot."""

    renderer: Renderer | None = None
    embeds: EmbedsReader | None = None
    media: MediaProcessor | None = None
    encoded: EncodedMedia | None = None
    count_tokens: Callable[[str], int] | None = None
    """How long a text is to a stage that draws from it."""


class Engine(Protocol):
    """A running engine: a launcher returns it ready to generate."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def parts(self) -> EngineParts: ...

    @property
    def counting(self) -> Counting: ...

    async def stream(self, job: Job, sink: Sink) -> None:
        """Hands over every output, returns after the last. A sink that raises ends the job, here too."""

    async def abort(self, job_id: str) -> None:
        """Idempotent; unknown ids are ignored."""

    async def control(self, op: EngineOp) -> int | None:
        """Do it, or raise: AdapterRefused, WrongState, EngineRequestFailed, EngineDead.

        Returns the bytes of device memory that `Sleep` freed, where that can be told.
        """

    async def check_health(self) -> None:
        """Raises EngineDead once the engine is gone. A hung engine passes: only a job shows a hang."""

    def outputs_seen(self) -> Mapping[int, int]:
        """For each rank, grows with everything it puts out; standing still while work waits means a hang."""

    async def vitals(self) -> Mapping[int, Vitals]:
        """What the processes of each rank are doing; ranks of which that is not known are left out."""

    def metrics_text(self) -> str:
        """The engine's own series in Prometheus' text format."""

    async def close(self) -> None:
        """Idempotent."""


Launcher = Callable[[OnLoad, OnPhase], Awaitable[Engine]]
"""Starts an engine. Where it raises, or is cancelled, nothing of the engine is left."""
