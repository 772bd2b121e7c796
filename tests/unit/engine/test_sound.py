"""Sounds: windows that end at quiet places, and other sample rates."""

from __future__ import annotations

import numpy as np
import pytest

from dynamo_vllm.engine import sound

RATE = 1000


def noise(seconds: float, rate: int = RATE) -> sound.Samples:
    return np.random.default_rng(3).uniform(-0.5, 0.5, int(seconds * rate)).astype(np.float32)


def test_windows_cover_a_long_sound_and_end_in_pauses() -> None:
    samples = noise(25)
    for pause in (9.0, 18.0):
        samples[int(pause * RATE) : int((pause + 0.3) * RATE)] *= 0.001
    made = sound.windows(samples, RATE, 10)
    assert made[0][0] == 0 and made[-1][1] == len(samples)
    assert all(before[1] == after[0] for before, after in zip(made, made[1:], strict=False))
    assert all(last - first <= 10 * RATE for first, last in made)
    assert 9.0 < made[0][1] / RATE < 9.3
    assert 18.0 < made[1][1] / RATE < 18.3


def test_silent_windows_are_left_out_but_one() -> None:
    samples = np.concatenate([noise(10), np.zeros(30 * RATE, np.float32), noise(5)])
    made = sound.windows(samples, RATE, 10)
    assert sum(last - first for first, last in made) < 30 * RATE  # two of them end within the silence
    assert made[-1][1] == len(samples)
    assert sound.windows(np.zeros(30 * RATE, np.float32), RATE, 10) == [(0, 10 * RATE)]
    assert sound.windows(noise(10), RATE, 10) == [(0, 10 * RATE)], "and a short sound is one"
    assert sound.windows(noise(0.001), RATE, 10) == [(0, 1)]


@pytest.mark.parametrize("rate", [1, 7, 50])
def test_any_rate_has_windows_that_end(rate: int) -> None:
    made = sound.windows(noise(100, rate), rate, 3)
    assert made[-1][1] == 100 * rate
    assert max(last - first for first, last in made) <= 3 * rate


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 44056, 48000, 96000, 191_999])
def test_tone_stays_the_same_at_another_rate(rate: int) -> None:
    def tone(of: int) -> sound.Samples:
        made: sound.Samples = np.sin(2 * np.pi * 440 * np.arange(of) / of).astype(np.float32)
        return made

    made = sound.resampled(tone(rate), rate, 16000)
    assert made.dtype == np.float32
    assert abs(len(made) - 16000) <= 1
    inside = slice(800, 15000)
    assert np.abs(made[inside] - tone(16000)[inside]).max() < 0.02


def test_tones_above_the_new_rate_vanish() -> None:
    high = np.sin(2 * np.pi * 12_000 * np.arange(48_000) / 48_000).astype(np.float32)
    assert np.abs(sound.resampled(high, 48_000, 16_000)[800:15000]).max() < 0.01
    for count in (1, 2, 100):
        assert len(sound.resampled(np.ones(count, np.float32), 44_100, 16_000)) >= 1
