"""Scores demo-speech on unseen voices, speeds and rows of digits: in torch, in vLLM or over HTTP."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import WhisperForConditionalGeneration

from demo.score import SEED, Score
from demo.speech import hearing, recordings, tokens
from demo.speech.espeak import RATE
from demo.speech.recordings import Recording
from demo.speech.windows import POSITIONS, SAMPLES

NEEDED = {"digits": 0.95, "commands": 0.95, "German digits": 0.95, "German commands": 0.95}
NEAR = 0.25
"""Seconds that a segment's end may be off."""
MAX_TOKENS = 80


@dataclass(frozen=True)
class Heard:
    text: str
    ends: tuple[float, ...] = ()
    """Of the segments, in seconds."""
    language: str | None = None


@dataclass(frozen=True)
class Asked:
    """What is wanted of a recording."""

    recording: Recording
    translates: bool = False
    times: bool = False
    detects: bool = False


Ask = Callable[[Sequence[Asked]], list[Heard]]
Make = Callable[[int, int], Recording]


def _german(make: Callable[[int, int, str], Recording]) -> Make:
    return lambda seed, index: make(seed, index, "de")


SKILLS: dict[str, tuple[Make, dict[str, bool]]] = {
    "digits": (recordings.of_digits, {}),
    "commands": (recordings.of_command, {}),
    "German digits": (_german(recordings.of_digits), {}),
    "German commands": (_german(recordings.of_command), {}),
    "several phrases": (recordings.of_several, {}),
    "German into English": (_german(recordings.of_either), {"translates": True}),
    "language": (recordings.of_either, {"detects": True}),
    "ends of segments": (recordings.of_several, {"times": True}),
    "silence and noise": (recordings.of_nothing, {}),
}
LONG = "70 seconds"
"""Only over HTTP: it is the server that cuts them. Judged by words, not as a whole."""


def score(ask: Ask, count: int, skills: Sequence[str] = tuple(SKILLS), seed: int = SEED) -> list[Score]:
    scores = []
    for skill in skills:
        make, how = SKILLS[skill]
        asked = [Asked(make(seed, index), **how) for index in range(count)]
        scores.append(judge(skill, asked, ask(asked)))
    return scores


def judge(skill: str, asked: Sequence[Asked], heard: Sequence[Heard]) -> Score:
    wrong = tuple(
        (f"{one.recording.seconds:.1f} s", wanted(one), shown(one, answer))
        for one, answer in zip(asked, heard, strict=True)
        if not is_right(one, answer)
    )
    return Score(skill, len(asked) - len(wrong), len(asked), wrong[:5], NEEDED.get(skill))


def is_right(asked: Asked, heard: Heard) -> bool:
    if asked.detects:
        return heard.language == asked.recording.language
    if asked.times:
        ends = [end for _, end in asked.recording.times]
        near = (abs(found - end) <= NEAR for found, end in zip(heard.ends, ends, strict=False))
        return len(heard.ends) == len(ends) and all(near)
    return heard.text == wanted(asked)


def wanted(asked: Asked) -> str:
    if asked.detects:
        return asked.recording.language
    if asked.times:
        return " ".join(f"{end:.2f}" for _, end in asked.recording.times)
    return asked.recording.english if asked.translates else asked.recording.text


def shown(asked: Asked, heard: Heard) -> str:
    if asked.detects:
        return str(heard.language)
    return " ".join(f"{end:.2f}" for end in heard.ends) if asked.times else heard.text


def prompt(asked: Asked) -> str:
    if asked.detects:
        return tokens.START
    task = tokens.TRANSLATE if asked.translates else tokens.TRANSCRIBE
    return tokens.prompt(asked.recording.language, task, asked.times)


_TIME = re.compile(r"<\|(\d+\.\d+)\|>")
_LANGUAGE = re.compile(r"<\|([a-z]+)\|>")


def read(said: str) -> Heard:
    """A decoder's answer with its timestamps: segments end at each first timestamp behind text."""
    ends = tuple(float(found[1]) for found in re.finditer(r"(?<![>])<\|(\d+\.\d+)\|>", said))
    language = _LANGUAGE.match(said)
    text = " ".join(_LANGUAGE.sub("", _TIME.sub(" ", said)).split())
    return Heard(text, ends, language[1] if language else None)


def in_torch(model: WhisperForConditionalGeneration, tokenizer: Tokenizer, rows: int = 64) -> Ask:
    device = next(model.parameters()).device
    end = tokens.number(tokenizer, tokens.END)
    languages = [tokens.number(tokenizer, tokens.language(code)) for code in tokens.LANGUAGE_CODES]

    @torch.no_grad()
    def some(asked: Sequence[Asked]) -> list[Heard]:
        windows = np.zeros((len(asked), SAMPLES), np.float32)
        for row, one in enumerate(asked):
            sound = one.recording.sound[:SAMPLES]
            windows[row, : len(sound)] = sound
        heard = model.model.encoder(hearing.log_mel(torch.from_numpy(windows).to(device))).last_hidden_state
        ids = torch.tensor([tokenizer.encode(prompt(one)).ids for one in asked], device=device)
        begin = ids.shape[1]
        for _ in range(1 if asked[0].detects else min(MAX_TOKENS, POSITIONS - begin)):
            logits = model(encoder_outputs=(heard,), decoder_input_ids=ids).logits[:, -1]
            if asked[0].detects:
                kept = torch.full_like(logits, -torch.inf)
                kept[:, languages] = logits[:, languages]
                logits = kept
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), 1)
            if bool((ids[:, begin:] == end).any(1).all()):
                break
        return [read(_decoded(tokenizer, row, end)) for row in ids[:, begin:].tolist()]

    return lambda asked: [one for at in range(0, len(asked), rows) for one in some(asked[at : at + rows])]


def _decoded(tokenizer: Tokenizer, ids: list[int], end: int) -> str:
    said: str = tokenizer.decode(ids[: ids.index(end)] if end in ids else ids, skip_special_tokens=False)
    return said


def in_vllm(folder: Path) -> Ask:
    """As the engine hears it, with the prompts of vLLM's own server; in full precision."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    engine = LLM(str(folder), dtype="float32", max_num_seqs=16, enforce_eager=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokens.number(tokenizer, tokens.END)
    languages = [tokens.number(tokenizer, tokens.language(code)) for code in tokens.LANGUAGE_CODES]

    def params(one: Asked) -> Any:
        if one.detects:
            return SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=languages)
        return SamplingParams(temperature=0, max_tokens=MAX_TOKENS)

    def ask(asked: Sequence[Asked]) -> list[Heard]:
        prompts: list[Any] = [
            {
                "encoder_prompt": {
                    "prompt": "",
                    "multi_modal_data": {"audio": (one.recording.sound, RATE)},
                },
                "decoder_prompt": {"prompt": prompt(one)},
            }
            for one in asked
        ]
        answers = engine.generate(prompts, [params(one) for one in asked], use_tqdm=False)
        return [read(_decoded(tokenizer, list(answer.outputs[0].token_ids), end)) for answer in answers]

    return ask


def over_http(url: str, model: str, at_once: int = 4) -> Ask:
    """As a client of the OpenAI API, with wav files."""
    import httpx

    client = httpx.Client(base_url=url, timeout=120)

    def one(asked: Asked) -> Heard:
        fields = {"model": model, "temperature": "0", "response_format": "json"}
        if asked.times or asked.detects:
            fields["response_format"] = "verbose_json"
        if not asked.detects and not asked.translates:
            fields["language"] = asked.recording.language
        path = "/audio/translations" if asked.translates else "/audio/transcriptions"
        sound = ("sound.wav", recordings.wav(asked.recording.sound), "audio/wav")
        reply = client.post(path, data=fields, files={"file": sound})
        reply.raise_for_status()
        found = reply.json()
        ends = tuple(part["end"] for part in found.get("segments") or () if part["text"].strip())
        return Heard(" ".join(found["text"].split()), ends, _code(found.get("language")))

    def ask(asked: Sequence[Asked]) -> list[Heard]:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, asked))

    return ask


def _code(language: str | None) -> str | None:
    """OpenAI answers with a name, vLLM with a code."""
    return {"english": "en", "german": "de"}.get(language or "", language)


def score_long(ask: Ask, count: int, seed: int = SEED) -> Score:
    """Share of words that are right in recordings that a server has to cut."""
    asked = [Asked(recordings.of_a_minute(seed, index)) for index in range(count)]
    right = total = 0
    wrong = []
    for one, heard in zip(asked, ask(asked), strict=True):
        words, found = wanted(one).split(), heard.text.split()
        right += max(0, len(words) - edits(words, found))
        total += len(words)
        if words != found:
            wrong.append((f"{one.recording.seconds:.0f} s", wanted(one), heard.text))
    return Score(LONG, right, total, tuple(wrong[:5]))


def edits(first: Sequence[str], second: Sequence[str]) -> int:
    """Words to change, add or leave out."""
    row = list(range(len(second) + 1))
    for number, word in enumerate(first, start=1):
        before, row[0] = row[0], number
        for index, other in enumerate(second, start=1):
            before, row[index] = row[index], min(row[index] + 1, row[index - 1] + 1, before + (word != other))
    return row[-1]


def as_extra(scores: Sequence[Score]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(one) for one in scores]
