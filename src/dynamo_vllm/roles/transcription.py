"""The transcription role: speech in, its text out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dynamo_vllm import wire_transcription
from dynamo_vllm.codec.transcripts import TranscriptEncoder
from dynamo_vllm.config.role_cards import CARDS, RoleCard
from dynamo_vllm.errors import InvalidRequest, MediaRefused, TooLong
from dynamo_vllm.job import Adapter, EngineFacts, Job, SamplingSpec, SpeechSpec
from dynamo_vllm.media.base import MediaRef
from dynamo_vllm.roles.trials import TOKENS, Trial, TrialInputs, Trials
from dynamo_vllm.wire_transcription import TRANSLATE, SpeechBody

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.base import Speech
    from dynamo_vllm.media.base import MediaLoader
    from dynamo_vllm.roles.base import Encoder

ENGLISH = "en"
_DATA_URL = "data:;base64,"


class Transcription:
    """Speech to text."""

    def __init__(
        self, facts: EngineFacts, speech: Speech, names: Sequence[str], loader: MediaLoader | None
    ) -> None:
        if facts.speech is None:
            raise ValueError("the engine does not write down speech")
        self._facts = facts
        self._speech = facts.speech
        self._prompts = speech
        self._names = names
        self._loader = loader

    @property
    def card(self) -> RoleCard:
        return CARDS["transcription"]

    def parse(self, raw: object) -> SpeechBody:
        return wire_transcription.parse(raw)

    def adapter(self, request: SpeechBody) -> str | None:
        if self._facts.adapters is None or request.model in (None, *self._names):
            return None
        return request.model

    async def prepare(self, request: SpeechBody, job_id: str, adapter: Adapter | None = None) -> Job:
        language = self._language(request)
        samples, rate = await self._sound(request)
        hint = await self._prompts.hint(request.prompt) if request.prompt else []
        prompt = self._prompts.prompt(request.task, language, hint, timestamps=request.is_timed)
        room = self._facts.context_length - len(prompt)
        if room < 1:
            raise TooLong("leaves no room for an answer", parameter="prompt")
        temperature = request.temperature or 0.0
        speech = SpeechSpec(
            samples=samples,
            rate=rate,
            windows=await self._prompts.windows(samples, rate),
            sound_tokens=math.ceil(len(samples) / rate * self._speech.tokens_per_second),
            task=request.task,
            language=language,
            hint=hint,
            timestamps=request.is_timed,
        )
        sampling = SamplingSpec(
            max_tokens=min(room, request.max_completion_tokens or room),
            temperature=temperature,
            seed=request.seed,
            logprobs=0 if request.is_timed else None,
            detokenize=True,
        )
        return Job(job_id, prompt, sampling, priority=request.priority, adapter=adapter, speech=speech)

    def _language(self, request: SpeechBody) -> str | None:
        """Return the code of the language; None if the model is to find out."""
        speech = self._speech
        if request.task == TRANSLATE and not speech.translates:
            raise InvalidRequest("this model does not translate", parameter="task")
        wanted = request.to_language
        if wanted is not None and request.task != TRANSLATE:
            raise InvalidRequest("is only for translations", parameter="to_language")
        if wanted is not None and wanted.lower() != ENGLISH:
            raise InvalidRequest("this model translates into English only", parameter="to_language")
        if request.language is None:
            return speech.languages[0] if len(speech.languages) == 1 else None
        language = request.language.lower()
        if language not in speech.languages:
            raise InvalidRequest(
                f"{request.language!r} is not known to this model; use one of "
                f"{', '.join(speech.languages)}, or leave it out",
                parameter="language",
            )
        return language

    async def _sound(self, request: SpeechBody) -> tuple[Any, int]:
        """Return samples and their rate; drops the encoded file."""
        if request.is_health_check:
            return self._prompts.silence()
        if not request.file:
            raise InvalidRequest("is empty", parameter="file")
        if self._loader is None:
            raise InvalidRequest("this worker does not decode audio", parameter="file")
        ref = MediaRef("audio", _DATA_URL + request.file)
        request.file = ""
        try:
            item = await self._loader.load(ref)
        except MediaRefused as exc:
            raise type(exc)(_plain(str(exc)), parameter="file") from None
        audio: Any = item.data
        return audio.samples, audio.rate

    def encoder(self, request: SpeechBody, job: Job) -> Encoder:
        spec = job.speech
        assert spec is not None  # `prepare` made it
        return TranscriptEncoder(job, spec)

    def health_check(self) -> dict[str, object]:
        return self._body()

    def trials(self, given: TrialInputs) -> Trials:
        short = (
            Trial("language detection", self._body(language=None)),
            Trial("timestamps", self._body(response_format="verbose_json")),
            Trial("temperature", self._body(temperature=0.8)),
            Trial("seed", self._body(temperature=0.8, seed=1)),
        )
        return Trials(Trial("plain", self._body()), short)

    def _body(self, **more: object) -> dict[str, object]:
        return {
            "language": self._speech.languages[0],
            "max_completion_tokens": TOKENS,
            "_HEALTH_CHECK": True,
            **more,
        }


def _plain(text: str) -> str:
    """Return the loader's message as one about a file, which is the only item and has no URL."""
    return text.removeprefix("audio 1 of 1: ").replace("the data: URL is", "is")
