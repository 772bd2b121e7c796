"""Prepares speech for Whisper models: prompts, windows of sound, language tokens."""

from __future__ import annotations

import asyncio
import functools
import re
from typing import TYPE_CHECKING, Any

from dynamo_vllm.codec import transcripts
from dynamo_vllm.engine import sound
from dynamo_vllm.engine.process.background import in_thread
from dynamo_vllm.engine.vllm import convert
from dynamo_vllm.errors import StartError
from dynamo_vllm.job import SpeechFacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.engine.vllm.names import ModelConfig, Renderer

ARCHITECTURE = "WhisperForConditionalGeneration"
START, HINT, NO_TIMESTAMPS = "<|startoftranscript|>", "<|startofprev|>", "<|notimestamps|>"
FIRST_TIMESTAMP = "<|0.00|>"
SILENCE_SECONDS = 1.0
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")


def facts(renderer: Renderer, model: ModelConfig) -> SpeechFacts | None:
    """Returns what a Whisper model understands; None for any other model."""
    if ARCHITECTURE not in (getattr(model.hf_config, "architectures", None) or ()):
        return None
    extractor = renderer.mm_processor.info.get_feature_extractor()
    vocabulary = renderer.get_tokenizer().get_vocab()
    missing = [token for token in (START, NO_TIMESTAMPS, FIRST_TIMESTAMP) if token not in vocabulary]
    if missing:
        raise StartError(f"the tokenizer of {model.model} lacks {', '.join(missing)}")
    seconds = float(extractor.chunk_length)
    languages = tuple(_languages(vocabulary))
    is_multilingual = model.try_get_generation_config().get("is_multilingual", True) and languages
    return SpeechFacts(
        languages=languages if is_multilingual else ("en",),
        window_seconds=seconds,
        tokens_per_second=model.hf_config.max_source_positions / seconds,
        translates=bool(is_multilingual),
    )


def _languages(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Returns the languages that a vocabulary has tokens for, in the order of their ids."""
    found = {named[1]: vocabulary[token] for token in vocabulary if (named := _LANGUAGE.fullmatch(token))}
    return dict(sorted(found.items(), key=lambda item: item[1]))


class VllmSpeech:
    """The speech part of one engine."""

    def __init__(self, renderer: Renderer, facts: SpeechFacts, model: ModelConfig) -> None:
        self._renderer = renderer
        self._window_seconds = facts.window_seconds
        extractor = renderer.mm_processor.info.get_feature_extractor()
        self._rate: int = extractor.sampling_rate
        self._tokenizer: Any = renderer.get_tokenizer()
        self._vocabulary: Mapping[str, int] = self._tokenizer.get_vocab()
        self._languages = _languages(self._vocabulary) if facts.translates else {}
        self._names = {token: code for code, token in self._languages.items()}
        self.first_timestamp = self._vocabulary[FIRST_TIMESTAMP]
        added = self._tokenizer.get_added_vocab()
        self._not_text = frozenset(added.values())
        self._resampling = asyncio.Semaphore(1)  # of 192 kHz a window takes a quarter of a GB meanwhile
        self._most_hint = model.max_model_len // 2 - 1  # as Whisper was trained

    async def hint(self, text: str) -> list[int]:
        if HINT not in self._vocabulary:
            return []
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._renderer._executor, self._encoded, f" {text.strip()}")
        # What reads like a special token in a client's text must not become one.
        return [token for token in ids if token not in self._not_text][-self._most_hint :]

    def _encoded(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def prompt(self, task: str, language: str | None, hint: Sequence[int], *, timestamps: bool) -> list[int]:
        names = self._vocabulary
        made = [names[HINT], *hint] if hint else []
        made.append(names[START])
        if self._languages:
            made.append(self._languages[language or next(iter(self._languages))])
            made.append(names[f"<|{task}|>"])
        made.append(names[FIRST_TIMESTAMP if timestamps else NO_TIMESTAMPS])
        return made

    @property
    def start(self) -> list[int]:
        """The prompt after which the model says the language."""
        return [self._vocabulary[START]]

    @property
    def language_ids(self) -> list[int]:
        return list(self._names)

    def language(self, token: int) -> str:
        return self._names[token]

    async def windows(self, samples: Any, rate: int) -> list[tuple[int, int]]:
        work = functools.partial(sound.windows, samples, rate, self._window_seconds)
        found: list[tuple[int, int]] = await in_thread(work)
        return found

    def silence(self) -> tuple[Any, int]:
        return sound.silence(self._rate, SILENCE_SECONDS), self._rate

    async def rendered(self, samples: Any, rate: int, prompt: Sequence[int]) -> dict[str, Any]:
        """Returns vLLM's input for one window."""
        if rate != self._rate:
            async with self._resampling:
                samples = await in_thread(functools.partial(sound.resampled, samples, rate, self._rate))
        given = {
            "encoder_prompt": {"prompt": "", "multi_modal_data": {"audio": (samples, self._rate)}},
            "decoder_prompt": {"prompt_token_ids": self.start},
        }
        try:
            (made,) = await self._renderer.render_cmpl_async([given])
        except Exception as exc:
            raise convert.error(exc, has_begun=True) from exc
        # Only now: vLLM 0.32 would put a start token before a prompt that begins with a hint.
        made["decoder_prompt"]["prompt_token_ids"] = list(prompt)
        return made

    def ticks(self, samples: int, rate: int) -> int:
        """Returns how many steps of timestamps a window has."""
        return round(samples / rate / transcripts.TICK)

    def text(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special ones."""
        found: str = self._tokenizer.decode(
            [token for token in ids if token not in self._not_text], skip_special_tokens=True
        )
        return found
