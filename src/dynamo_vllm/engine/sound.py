"""Divides long sounds at quiet places, and changes their sample rate; with numpy alone."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Samples = NDArray[np.float32]

SILENCE = 1e-4
"""Nobody speaks below this level, where full scale is 1: three steps of 16 bits."""
QUIET_SECONDS = 0.1
STEP_SECONDS = 0.02
SEARCHED = 6
"""A window ends in the last sixth of what the model hears at once."""
_PADDING_SECONDS = 0.05
_LARGEST_UNIT = 1000


def windows(samples: Samples, rate: int, seconds: float) -> list[tuple[int, int]]:
    """Returns the parts of a sound, each of this length at most and cut at a quiet place.

    Silent parts are left out: a model that hears nothing makes something up. One part stays in any case.
    """
    longest, end, first = max(1, int(seconds * rate)), len(samples), 0
    made: list[tuple[int, int]] = []
    while first < end:
        last = end
        if end - first > longest:
            last = quietest(samples, first + longest - longest // SEARCHED, first + longest, rate)
        if not is_silent(samples[first:last]):
            made.append((first, last))
        first = last
    return made or [(0, min(longest, end))]


def quietest(samples: Samples, first: int, last: int, rate: int) -> int:
    """Returns the middle of the quietest tenth of a second, of several the last."""
    width, step = max(1, int(QUIET_SECONDS * rate)), max(1, int(STEP_SECONDS * rate))
    if last - first <= width:
        return last
    sums = np.concatenate([[0.0], np.cumsum(np.square(samples[first:last], dtype=np.float64))])
    places = np.arange(0, last - first - width + 1, step)
    # Rounded: differences of rounding must not decide between places of the same silence.
    energies = np.round((sums[places + width] - sums[places]) / width, 12)
    best = len(places) - 1 - int(np.argmin(energies[::-1]))
    return first + int(places[best]) + width // 2


def is_silent(samples: Samples) -> bool:
    return not len(samples) or max(-float(samples.min()), float(samples.max())) < SILENCE


def resampled(samples: Samples, rate: int, wanted: int) -> Samples:
    """Returns the same sound with another number of samples a second.

    Its spectrum is cut or extended. The sound is continued with silence on both sides, because the Fourier
    transform takes the end to come before the beginning.
    """
    if rate == wanted:
        return samples
    # Of odd rates the nearest ratio of small numbers: the transform is slow for lengths with large factors.
    ratio = Fraction(wanted, rate).limit_denominator(_LARGEST_UNIT)
    unit, made_unit = ratio.denominator, ratio.numerator
    padding = -(-int(_PADDING_SECONDS * rate) // unit)
    units = _smooth(2 * padding + -(-len(samples) // unit))
    padded = np.zeros(units * unit, dtype=np.float32)
    padded[padding * unit : padding * unit + len(samples)] = samples
    size = units * made_unit
    made = np.fft.irfft(np.fft.rfft(padded)[: size // 2 + 1], size) * (made_unit / unit)
    count = -(-len(samples) * made_unit // unit)
    return made[padding * made_unit :][:count].astype(np.float32)


def _smooth(number: int) -> int:
    """Returns the next number without prime factors above 5."""
    while True:
        rest = number
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return number
        number += 1


def silence(rate: int, seconds: float) -> Any:
    return np.zeros(int(rate * seconds), dtype=np.float32)
