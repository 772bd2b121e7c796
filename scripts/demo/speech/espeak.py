"""Speaks with espeak-ng: the library of the package `espeakng-loader`, or that of the system.

Both are tools of the making: no part of them gets into the model's folder. Breath and flutter of a voice are
random in it, so the same phrase differs a little each time.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib
import importlib.util
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from demo.speech.phrases import Phrase
from demo.speech.voices import Manner

RATE = 16_000
"""Samples per second of everything outside this module."""
_SYNCHRONOUS, _UTF8 = 2, 1
_SPEED, _LOUDNESS, _PITCH, _MELODY, _GAP = 1, 2, 3, 4, 7
_QUIET = 0.01
"""Of the loudest sample: what is below it at both ends is cut off."""
MISSING = (
    "no speech synthesiser: install espeakng-loader (pip install --target FOLDER espeakng-loader, then "
    "PYTHONPATH=FOLDER), or Debian's libespeak-ng1"
)
_LAST_EVENT, _WORD_EVENT = 0, 1


class _Event(ctypes.Structure):
    """espeak_EVENT of speak_lib.h."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("milliseconds", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("name", ctypes.c_char * 8),
    )


_Received = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


@dataclass(frozen=True)
class Spoken:
    """A sound at 16 kHz, without silence around it, as loud as 16 bits allow."""

    samples: NDArray[np.int16]
    words: tuple[int, ...]
    """Where each word begins; empty where espeak-ng joined two of them."""


def is_here() -> bool:
    return bool(importlib.util.find_spec("espeakng_loader") or ctypes.util.find_library("espeak-ng"))


def say(phrase: Phrase, manner: Manner) -> Spoken:
    text = phrase.text if phrase.is_command or not manner.comma else ", ".join(phrase.words)
    sound, begins = _engine().speak(text, manner)
    loudest = float(np.abs(sound).max(initial=0.0))
    if not loudest:
        raise ValueError(f"{manner} said nothing for {text!r}")
    heard = np.flatnonzero(np.abs(sound) > _QUIET * loudest)
    cut = sound[heard[0] : heard[-1] + 1]
    words = tuple(max(0, min(begin - int(heard[0]), len(cut) - 1)) for begin in begins)
    return Spoken(
        np.round(cut * (32_000 / loudest)).astype(np.int16), words if len(words) == len(phrase.words) else ()
    )


@functools.cache
def _engine() -> _Engine:
    return _Engine()


class _Engine:
    """One per process: the library has one voice at a time."""

    def __init__(self) -> None:
        library, data = _find()
        self._library: Any = ctypes.CDLL(library)
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data.encode() if data else None, 0)
        if self._rate <= 0:
            raise SystemExit(f"espeak-ng found no data in {data or 'its folder'}")
        self._parts: list[NDArray[np.int16]] = []
        self._words: list[int] = []
        self._callback = _Received(self._receive)  # kept: the library calls it
        self._library.espeak_SetSynthCallback(self._callback)

    def speak(self, text: str, manner: Manner) -> tuple[NDArray[np.float32], list[int]]:
        """The sound, and where its words begin."""
        self._parts.clear()
        self._words.clear()
        if self._library.espeak_SetVoiceByName(manner.voice.encode()):
            raise ValueError(f"espeak-ng has no voice {manner.voice!r}")
        settings = (
            (_SPEED, manner.speed),
            (_LOUDNESS, 80),
            (_PITCH, manner.pitch),
            (_MELODY, manner.melody),
            (_GAP, manner.gap),
        )
        for number, value in settings:
            self._library.espeak_SetParameter(number, value, 0)
        encoded = text.encode()
        self._library.espeak_Synth(encoded, len(encoded) + 1, 0, 0, 0, _UTF8, None, None)
        self._library.espeak_Synchronize()
        if not self._parts:
            return np.zeros(0, dtype=np.float32), []
        begins = [round(sample * RATE / self._rate) for sample in self._words]
        return resample(np.concatenate(self._parts), self._rate), begins

    def _receive(self, samples: Any, count: int, events: Any) -> int:
        for index in itertools.count():
            if events[index].type == _LAST_EVENT:
                break
            if events[index].type == _WORD_EVENT:
                self._words.append(events[index].sample)
        if count > 0:
            self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0


def resample(sound: NDArray[np.int16], rate: int) -> NDArray[np.float32]:
    """By the Fourier transform: sounds are short and begin and end quietly."""
    wanted = round(len(sound) * RATE / rate)
    spectrum = np.fft.rfft(sound.astype(np.float32))[: wanted // 2 + 1]
    return (np.fft.irfft(spectrum, wanted) * (wanted / len(sound))).astype(np.float32)


def _find() -> tuple[str, str | None]:
    if importlib.util.find_spec("espeakng_loader"):
        loader = importlib.import_module("espeakng_loader")
        return loader.get_library_path(), loader.get_data_path()
    if library := ctypes.util.find_library("espeak-ng"):
        return library, None
    raise SystemExit(MISSING)
