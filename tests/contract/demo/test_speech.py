"""Tests the data of demo-speech: what is said, by whom, and what the decoder is to write."""

from __future__ import annotations

import random
from functools import cache, partial

import numpy as np
import pytest
import torch
from demo.generator.base import is_held_out
from demo.speech import espeak, hearing, phrases, recordings, score, tokens, voices, windows
from demo.speech.phrases import LANGUAGES, Phrase
from tokenizers import Tokenizer

needs_voices = pytest.mark.skipif(not espeak.is_here(), reason=espeak.MISSING)


@cache
def tokenizer() -> Tokenizer:
    return tokens.learn()


def drawn(split: str, count: int = 400) -> list[Phrase]:
    chance = random.Random(1)
    return [phrases.digits(chance, split, "en") for _ in range(count)]  # type: ignore[arg-type]


def test_no_voice_and_no_speed_is_in_both_splits() -> None:
    assert not set(voices.TRAIN_VARIANTS) & set(voices.HELD_OUT_VARIANTS)
    trained = {speed for low, high in voices.TRAIN_SPEEDS for speed in range(low, high + 1)}
    held_out = {speed for low, high in voices.HELD_OUT_SPEEDS for speed in range(low, high + 1)}
    assert not trained & held_out
    assert min(held_out) < min(trained) and max(held_out) > max(trained)


def test_manners_keep_to_their_split() -> None:
    for split, variants, speeds in (
        ("train", voices.TRAIN_VARIANTS, voices.TRAIN_SPEEDS),
        ("held-out", voices.HELD_OUT_VARIANTS, voices.HELD_OUT_SPEEDS),
    ):
        chance = random.Random(2)
        for language in LANGUAGES * 100:
            manner = voices.manner(chance, split, language)  # type: ignore[arg-type]
            assert manner.variant in variants
            assert any(low <= manner.speed <= high for low, high in speeds)


def test_rows_of_digits_are_split_in_every_language() -> None:
    trained, held_out = ({one.text for one in drawn(split)} for split in ("train", "held-out"))
    shared = trained & held_out
    assert shared and all(len(text.split()) == phrases.SHARED_DIGITS for text in shared)
    for rows in (trained, held_out):
        assert {len(text.split()) for text in rows} == set(range(1, phrases.MOST_DIGITS + 1))
    german = phrases.digits(random.Random(1), "held-out", "de")
    assert german.english == drawn("held-out", 1)[0].english
    row = [phrases.DIGITS["de"].index(word) for word in german.words]
    assert len(row) <= phrases.SHARED_DIGITS or is_held_out(phrases.key(row))


def test_every_word_is_one_token() -> None:
    for word in phrases.vocabulary():
        assert len(tokenizer().encode(f" {word}").ids) == 1, word


def test_tokens_of_whisper_are_whole_and_times_are_not_special() -> None:
    cutter = tokenizer()
    found = cutter.encode(tokens.prompt("de", tokens.TRANSLATE, times=True))
    assert found.tokens == [tokens.START, "<|de|>", tokens.TRANSLATE, "<|0.00|>"]
    zero = tokens.number(cutter, "<|0.00|>")
    assert tokens.number(cutter, "<|10.00|>") == zero + tokens.LAST == cutter.get_vocab_size() - 1
    assert cutter.decode([zero + 72], skip_special_tokens=True) == "<|1.44|>"
    assert cutter.decode([tokens.number(cutter, tokens.START)], skip_special_tokens=True) == ""


def test_languages_are_those_of_whisper() -> None:
    from transformers.models.whisper.tokenization_whisper import LANGUAGES as KNOWN
    from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

    assert tuple(KNOWN) == tokens.LANGUAGE_CODES
    assert set(WhisperForConditionalGeneration.supported_languages) <= set(tokens.LANGUAGE_CODES)


def test_prompts_are_those_of_vllm() -> None:
    from vllm.config.speech_to_text import SpeechToTextConfig, SpeechToTextParams
    from vllm.model_executor.models.whisper import WhisperForConditionalGeneration

    for task in ("transcribe", "translate"):
        asked = SpeechToTextParams(
            audio=np.zeros(10, np.float32),
            stt_config=SpeechToTextConfig(),
            model_config=None,
            language="de",
            task_type=task,
        )
        made = WhisperForConditionalGeneration.get_generation_prompt(asked)
        assert made["decoder_prompt"]["prompt"] == tokens.prompt("de", f"<|{task}|>")


def test_sounds_lie_in_the_window_one_after_another() -> None:
    lengths = [espeak.RATE * tenths // 10 for tenths in range(2, 30)]
    seen = set()
    for seed in range(1000):
        chance = random.Random(seed)
        placed, end = windows.place(chance, lengths, partial(chance.randrange, len(lengths)))
        seen.add(len(placed))
        until = -windows.SMALLEST_GAP * espeak.RATE
        for one in placed:
            assert one.at - until >= windows.SMALLEST_GAP * espeak.RATE - 1
            until = one.at + one.length
        assert until <= end <= windows.SAMPLES
    assert seen == set(range(windows.SLOTS + 1))


def test_answers_have_texts_times_and_an_end() -> None:
    writer, cutter = windows.Writer(tokenizer()), tokenizer()
    placed = [windows.Placed(0, 8_000, 16_000), windows.Placed(1, 32_000, 4_800)]
    said = [phrases.command(4, "de"), phrases.row_of_digits((1, 2), "de")]

    def answer(translates: bool = False, times: bool = False, zero: bool = False) -> str:
        ids = writer.answer(placed, said, translates, times, zero)
        text: str = cutter.decode(ids, skip_special_tokens=False)
        return text

    assert answer() == " öffne die Tür eins zwei<|endoftext|>"
    assert answer(translates=True) == " open the door one two<|endoftext|>"
    timed = "<|0.50|> öffne die Tür<|1.50|><|2.00|> eins zwei<|2.30|><|endoftext|>"
    assert answer(times=True) == timed
    assert answer(times=True, zero=True) == timed.replace("0.50", "0.00")


def test_frames_know_their_words() -> None:
    writer = windows.Writer(tokenizer())
    placed = [windows.Placed(0, 16_000, 16_000), windows.Placed(1, 64_000, 8_000)]
    said = [phrases.row_of_digits((1, 2), "en"), phrases.command(0, "en")]
    frames = writer.frames(placed, [(0, 8_000), ()], said).tolist()
    one, two = (phrases.vocabulary().index(word) + 1 for word in ("one", "two"))
    assert frames[:50] == [0] * 50 and frames[50:75] == [one] * 25 and frames[75:100] == [two] * 25
    assert frames[100:200] == [0] * 100 and frames[200:225] == [windows.UNKNOWN] * 25
    assert len(frames) == tokens.LAST and len(phrases.vocabulary()) < windows.UNKNOWN


def test_rows_learn_the_language_and_the_answer_and_nothing_else() -> None:
    said = [phrases.command(index, language) for language in LANGUAGES for index in range(4)]
    made = windows.build(tokenizer(), np.full(len(said), 16_000), [()] * len(said), said, 1, 200)
    start, end = (tokens.number(tokenizer(), token) for token in (tokens.START, tokens.END))
    for ids, learnt, chosen in zip(made.ids, made.learnt, made.sounds, strict=True):
        at = list(ids).index(start)
        positions = np.flatnonzero(learnt != windows.IGNORED)
        assert (learnt[positions] == ids[positions + 1]).all()
        assert ids[positions[-1] + 1] == end
        if chosen[0] >= 0:
            assert positions[0] == at and positions[1] >= at + 2
        else:
            assert positions[0] > at


def test_features_are_those_of_transformers() -> None:
    from transformers import WhisperFeatureExtractor

    sound = np.random.default_rng(1).normal(0, 0.1, windows.SAMPLES).astype(np.float32)
    sound[90_000:] = 0
    theirs = WhisperFeatureExtractor(feature_size=hearing.MELS, chunk_length=tokens.WINDOW)(
        sound, sampling_rate=espeak.RATE, return_tensors="pt"
    ).input_features
    assert torch.allclose(hearing.log_mel(torch.from_numpy(sound)[None]), theirs, atol=1e-5)


def test_windows_hold_the_sounds_where_they_were_placed() -> None:
    samples = torch.arange(1, 3001, dtype=torch.int16)
    starts = torch.tensor([0, 1000, 3000])
    window = hearing.lay_out(
        samples, starts, torch.tensor([[1, 0], [0, -1]]), torch.tensor([[10, 5000], [7, 0]]), torch.ones(2, 2)
    )
    assert torch.equal(window[0, 10:2010] * 32_768, samples[1000:].float())
    assert torch.equal(window[0, 5000:6000] * 32_768, samples[:1000].float())
    assert torch.equal(window[1, 7:1007] * 32_768, samples[:1000].float())
    assert int((window != 0).sum()) == 4000


def test_worse_recordings_end_where_they_should() -> None:
    chance = torch.Generator().manual_seed(1)
    window = torch.randn(3, windows.SAMPLES, generator=chance) * 0.1
    ends = torch.tensor([1000, 80_000, windows.SAMPLES])
    heard = hearing.worsen(window, ends, chance)
    assert heard.abs().max() <= 1 and torch.isfinite(heard).all()
    for row, end in zip(heard, ends.tolist(), strict=True):
        assert not row[end:].any() and row[:end].any()


@pytest.mark.parametrize(
    ("said", "text", "ends", "language"),
    [
        (" one two", "one two", (), None),
        (" one<|0.50|><|0.90|> two<|1.30|>", "one two", (0.5, 1.3), None),
        ("<|de|>", "", (), "de"),
        ("<|0.00|>", "", (), None),
        ("", "", (), None),
    ],
)
def test_answers_are_taken_apart(said: str, text: str, ends: tuple[float, ...], language: str | None) -> None:
    found = score.read(said)
    assert (found.text, found.language) == (text, language)
    if text:
        assert found.ends == ends


def test_edits_are_counted_in_words() -> None:
    for said, heard, edits in (
        ("one two three", "one two three", 0),
        ("one two three", "one three", 1),
        ("one two", "two two four", 2),
        ("", "one", 1),
    ):
        assert score.edits(said.split(), heard.split()) == edits


@needs_voices
def test_held_out_recordings_are_repeatable_and_short_enough() -> None:
    first, again = recordings.of_several(3, 1), recordings.of_several(3, 1)
    assert first.text == again.text and np.allclose(first.times, again.times, atol=0.05)
    assert first.seconds < tokens.WINDOW and len(first.times) == len(first.phrases)
    assert recordings.wav(first.sound).startswith(b"RIFF")


@needs_voices
def test_every_voice_speaks() -> None:
    for split in ("train", "held-out"):
        trains = split == "train"
        for variant in voices.TRAIN_VARIANTS if trains else voices.HELD_OUT_VARIANTS:
            how = voices.Manner("en", variant, 160, 50, 50, 0, False)
            assert len(espeak.say(phrases.command(0, "en"), how).samples) > espeak.RATE // 4, variant
    for language in LANGUAGES:
        for accent in {*voices.TRAIN_ACCENTS[language], *voices.HELD_OUT_ACCENTS[language]}:
            how = voices.Manner(accent, "f1", 160, 50, 50, 0, True)
            said = espeak.say(phrases.row_of_digits((1, 2), language), how)
            assert 0 == said.words[0] < said.words[1] < len(said.samples)
