"""WAV files, read without any library."""

from __future__ import annotations

import struct
import sys
import types
from typing import Any

import numpy as np
import pytest

from dynamo_vllm.errors import MediaRefused
from dynamo_vllm.media.base import MediaLimits
from dynamo_vllm.media.cancellation import Deadline
from dynamo_vllm.media.decode import audio
from dynamo_vllm.media.decode.sniff import FORMATS
from harness import media

WAV = next(item for item in FORMATS if item.name == "WAV")


def wav(tag: int, bits: int, channels: int, body: bytes, extra: bytes = b"") -> bytes:
    fmt = struct.pack("<HHIIHH", tag, channels, 8000, 8000 * channels * bits // 8, channels * bits // 8, bits)
    fmt += extra
    chunks = b"fmt " + struct.pack("<I", len(fmt)) + fmt + b"LIST" + struct.pack("<I", 3) + b"abc\0"
    chunks += b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WAVE" + chunks


def read(data: bytes) -> list[float]:
    made, size = audio.decode(data, WAV, MediaLimits(), Deadline(5))
    assert made.samples.dtype == np.float32 and made.rate == 8000 and size == made.samples.nbytes
    return [float(value) for value in made.samples]


@pytest.mark.parametrize(
    ("tag", "bits", "body", "expected"),
    [
        (1, 8, bytes([0, 128, 255]), [-1.0, 0.0, 127 / 128]),
        (1, 16, struct.pack("<3h", -32768, 0, 16384), [-1.0, 0.0, 0.5]),
        (1, 24, b"\x00\x00\x80\x00\x00\x00\x00\x00\x40", [-1.0, 0.0, 0.5]),
        (1, 32, struct.pack("<3i", -(2**31), 0, 2**30), [-1.0, 0.0, 0.5]),
        (3, 32, struct.pack("<2f", 0.25, -2.0), [0.25, -2.0]),
        (3, 64, struct.pack("<2d", 0.25, -2.0), [0.25, -2.0]),
    ],
)
def test_full_scale_is_one(tag: int, bits: int, body: bytes, expected: list[float]) -> None:
    assert read(wav(tag, bits, 1, body)) == expected


def test_channels_become_their_mean() -> None:
    assert read(wav(1, 16, 2, struct.pack("<4h", 16384, 0, -16384, -16384))) == [0.25, -0.5]


def test_extensible_header_and_unknown_length_are_read() -> None:
    extra = struct.pack("<HHI", 22, 16, 0) + struct.pack("<H", 1) + bytes(14)
    data = wav(0xFFFE, 16, 1, struct.pack("<2h", 16384, 0), extra)
    assert read(data) == [0.5, 0.0]
    at = data.index(b"data") + 4
    assert read(data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]) == [0.5, 0.0]


def test_samples_that_are_no_numbers_or_far_above_full_scale_are_refused() -> None:
    with pytest.raises(MediaRefused, match="not numbers"):
        read(wav(3, 32, 1, struct.pack("<f", float("nan"))))
    loudest = 2.0**31
    assert read(wav(3, 32, 1, struct.pack("<2f", loudest, -loudest))) == [loudest, -loudest]
    with pytest.raises(MediaRefused, match="far above full scale"):
        read(wav(3, 32, 1, struct.pack("<2f", 0.0, -1e30)))


def test_other_types_need_soundfile_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MediaRefused, match="pip install soundfile") as caught:
        audio.decode_with_soundfile(b"fLaC", "FLAC", MediaLimits(), list[object]().append)
    assert caught.value.status == 415


class Endless:
    """What soundfile shows of a file whose header says one second and which never ends."""

    frames, samplerate, channels = 8000, 8000, 1

    def __init__(self, _: object) -> None: ...
    def __enter__(self) -> Endless:
        return self

    def __exit__(self, *_: object) -> None: ...
    def read(self, count: int, **_: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
        return np.zeros((count, 1), dtype=np.float32)


def test_length_that_the_header_does_not_tell_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(SoundFile=Endless, LibsndfileError=OSError)
    monkeypatch.setitem(sys.modules, "soundfile", library)
    with pytest.raises(MediaRefused, match="the limit is 30 s") as caught:
        audio.decode_with_soundfile(b"fLaC", "FLAC", MediaLimits(max_seconds=30), list[object]().append)
    assert caught.value.status == 413


def test_sound_of_too_many_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio, "MAX_AUDIO_BYTES", 1000)
    with pytest.raises(MediaRefused, match="more than 250 samples") as caught:
        read(media.sound())
    assert caught.value.status == 413


def test_decoding_ends_with_its_time() -> None:
    watch = Deadline(5)
    watch.stop()
    with pytest.raises(MediaRefused, match="not decoded within 5 s"):
        audio.decode(media.sound(), WAV, MediaLimits(), watch)
