"""From sounds to what the model hears: recordings with noise, echo and a loudness, then Whisper's log-mel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch

from demo.speech.espeak import RATE
from demo.speech.windows import SAMPLES

MELS, HOP, WIDTH = 80, 160, 400
SHARE_NOISY, SHARE_ECHOING, SHARE_COLOURED, SHARE_MASKED = 0.8, 0.3, 0.5, 0.5
QUIETEST = 0.05
"""Of the greatest loudness."""
SIGNAL_TO_NOISE = (8.0, 45.0)
"""Decibels."""
ECHO = RATE // 4
Some = Callable[..., torch.Tensor]
"""Random numbers from 0 to 1, in a shape."""


def log_mel(sound: torch.Tensor) -> torch.Tensor:
    """Whisper's features of whole windows, [rows, samples] to [rows, mels, frames]."""
    window = torch.hann_window(WIDTH, device=sound.device)
    spectrum = torch.stft(sound, WIDTH, HOP, window=window, return_complex=True)
    power = spectrum[..., :-1].abs().square()
    mels = _filters().to(sound.device) @ power
    levels = mels.clamp(min=1e-10).log10()
    levels = torch.maximum(levels, levels.amax(dim=(1, 2), keepdim=True) - 8.0)
    return (levels + 4.0) / 4.0


@functools.cache
def _filters() -> torch.Tensor:
    from transformers import WhisperFeatureExtractor

    return torch.from_numpy(WhisperFeatureExtractor(feature_size=MELS).mel_filters.T).float().contiguous()


def lay_out(
    samples: torch.Tensor,
    starts: torch.Tensor,
    sounds: torch.Tensor,
    places: torch.Tensor,
    loudness: torch.Tensor,
) -> torch.Tensor:
    """Recordings of a whole window: the sound of each slot from its place on, [rows, samples]."""
    clock = torch.arange(SAMPLES, device=samples.device)
    window = torch.zeros(len(sounds), SAMPLES, device=samples.device)
    for slot in range(sounds.shape[1]):
        sound = sounds[:, slot : slot + 1]
        if not bool((sound >= 0).any()):
            break
        known = sound.clamp(min=0)
        begin = starts[known]
        length = starts[known + 1] - begin
        at = clock - places[:, slot : slot + 1]
        inside = (at >= 0) & (at < length) & (sound >= 0)
        heard = samples[torch.where(inside, begin + at, 0)].float() / 32_768
        window += torch.where(inside, heard * loudness[:, slot : slot + 1], 0.0)
    return window


def worsen(window: torch.Tensor, ends: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Echo, another timbre, noise up to the recording's end, another loudness; silence behind it."""

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=window.device, generator=chance)

    rows = len(window)
    length = SAMPLES + ECHO
    spectrum = torch.fft.rfft(window, length)
    echo = torch.randn(rows, ECHO, device=window.device, generator=chance)
    fades = torch.arange(ECHO, device=window.device) / RATE
    echo = echo * torch.exp(-fades / (0.01 + 0.06 * some(rows, 1))) * 0.05 * some(rows, 1)
    echo[:, 0] = 1.0
    echo = torch.where(some(rows, 1) < SHARE_ECHOING, echo, _only_first(echo))
    spectrum = spectrum * torch.fft.rfft(echo, length) * _timbre(spectrum, some)
    window = torch.fft.irfft(spectrum, length)[:, :SAMPLES]
    noise = _noise(window, some, chance)
    level = window.square().mean(1, keepdim=True).sqrt().clamp(min=1e-3)
    low, high = SIGNAL_TO_NOISE
    decibels = low + (high - low) * some(rows, 1)
    noisy = window + noise * level * 10 ** (-decibels / 20) * (some(rows, 1) < SHARE_NOISY)
    loudest = noisy.abs().amax(1, keepdim=True).clamp(min=1e-4)
    noisy = noisy / loudest * torch.exp(np.log(QUIETEST) * some(rows, 1))
    recorded = torch.arange(SAMPLES, device=window.device) < ends[:, None]
    return torch.where(recorded, noisy, 0.0)


def masked(mels: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
    """Hide two bands and two short moments in some, so that no single trait decides."""

    def some(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=mels.device, generator=chance)

    rows, bands, frames = mels.shape
    hidden = torch.zeros(rows, bands, frames, dtype=torch.bool, device=mels.device)
    for width, size, axis in ((10, bands, 1), (10, bands, 1), (8, frames, 2), (8, frames, 2)):
        begin, wide = (some(rows) * size)[:, None], (some(rows) * width)[:, None]
        at = torch.arange(size, device=mels.device)
        found = (at >= begin) & (at < begin + wide)
        hidden |= found.unsqueeze(3 - axis)
    hidden &= (some(rows) < SHARE_MASKED)[:, None, None]
    return torch.where(hidden, mels.mean(dim=(1, 2), keepdim=True), mels)


def _only_first(echo: torch.Tensor) -> torch.Tensor:
    first = torch.zeros_like(echo)
    first[:, 0] = 1.0
    return first


def _timbre(spectrum: torch.Tensor, some: Some) -> torch.Tensor:
    """A gentle filter with eight bends, up to 8 dB either way."""
    rows, size = spectrum.shape
    bends = (some(rows, 1, 8) * 2 - 1) * 8
    bends = bends * (some(rows, 1, 1) < SHARE_COLOURED)
    curve = torch.nn.functional.interpolate(bends, size=size, mode="linear", align_corners=True)
    return 10 ** (curve[:, 0] / 20)


def _noise(window: torch.Tensor, some: Some, chance: torch.Generator) -> torch.Tensor:
    """From white to brown, of power 1."""
    rows, length = window.shape
    white = torch.fft.rfft(torch.randn(rows, length, device=window.device, generator=chance))
    tones = torch.arange(white.shape[1], device=window.device).clamp(min=20) / white.shape[1]
    coloured = torch.fft.irfft(white * tones ** -some(rows, 1), length)
    return coloured / coloured.square().mean(1, keepdim=True).sqrt()
