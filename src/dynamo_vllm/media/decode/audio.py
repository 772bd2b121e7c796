"""Decodes audio to one channel of floats at its own rate: WAV here, other formats in a child process.

Both give the same result as vLLM's loader, which uses soundfile for all of them; vLLM resamples for the
model.
"""

from __future__ import annotations

import struct
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from dynamo_vllm.errors import MediaRefused, MediaTooLarge, MediaTypeUnknown
from dynamo_vllm.media.base import MAX_AUDIO_BYTES, Audio
from dynamo_vllm.media.decode import decode_process

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from dynamo_vllm.media.base import MediaLimits
    from dynamo_vllm.media.cancellation import Deadline
    from dynamo_vllm.media.decode.sniff import MediaFormat

MAX_RATE = 192_000
MAX_CHANNELS = 8
MAX_LEVEL = 2.0**31
"""Full scale is 1, and audio that was not divided has this level. Far above it a model's spectrum
overflows.
"""
PIECE = 1 << 18
"""Frames that are decoded at a time."""
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_UNKNOWN_SIZE = 0xFFFFFFFF  # of a WAV that was written into a pipe


def decode(data: bytes, format: MediaFormat, limits: MediaLimits, watch: Deadline) -> tuple[Audio, int]:
    """Return the audio and the bytes it takes. Blocks; run it in a thread."""
    watch.check()
    audio = (
        _one_channel(*_wav(data, limits))
        if format.name == "WAV"
        else _decode_in_child(data, format, limits, watch)
    )
    if not audio.samples.size:
        raise MediaRefused("the audio is empty")
    lowest, highest = audio.samples.min(), audio.samples.max()  # without a copy: it may be hours of sound
    if not np.isfinite(lowest) or not np.isfinite(highest):
        raise MediaRefused("the audio has samples that are not numbers")
    if max(-lowest, highest) > MAX_LEVEL:
        raise MediaRefused("the audio has samples far above full scale, which is 1")
    return audio, audio.samples.nbytes


def _one_channel(channels: NDArray[np.float32], rate: int) -> Audio:
    mono = channels[:, 0] if channels.shape[1] == 1 else np.mean(channels.T, axis=0)
    return Audio(np.ascontiguousarray(mono, dtype=np.float32), rate)


def _decode_in_child(data: bytes, format: MediaFormat, limits: MediaLimits, watch: Deadline) -> Audio:
    with decode_process.decoder(data, format, limits, watch) as decoder:
        read = decoder.receive()
        if not read["samples"]:
            return Audio(np.zeros(0, dtype=np.float32), read["rate"])
        memory = decoder.decoded(read["samples"] * 4)
    return Audio(np.frombuffer(memory, dtype=np.float32), read["rate"])


def _check(frames: int, rate: int, channels: int, limits: MediaLimits) -> None:
    if not 0 < rate <= MAX_RATE or not 0 < channels <= MAX_CHANNELS:
        raise MediaRefused(
            f"audio with {channels} channels at {rate} Hz is not supported; "
            f"use at most {MAX_CHANNELS} channels and {MAX_RATE} Hz"
        )
    if frames > rate * limits.max_seconds:
        raise MediaTooLarge(f"the audio lasts {frames / rate:.0f} s; the limit is {limits.max_seconds:g} s")
    most = limits.max_speech_bytes
    size, most = (frames * channels * 4, MAX_AUDIO_BYTES) if most is None else (frames * 4, most)
    if size > most:
        raise MediaTooLarge(f"the audio has more than {most // 4} samples")


def _wav(data: bytes, limits: MediaLimits) -> tuple[NDArray[np.float32], int]:
    """Return samples (frames, channels) and the rate."""
    head, body = _wav_chunks(data)
    if len(head) < 16:
        raise MediaRefused("the WAV is broken or cut off")
    tag, channels, rate, _, _, bits = struct.unpack("<HHIIHH", head[:16])
    if tag == _EXTENSIBLE and len(head) >= 26:
        tag = int.from_bytes(head[24:26], "little")
    if (tag, bits) not in _WIDTHS:
        raise MediaTypeUnknown(
            f"a WAV of encoding {tag} with {bits} bits is not supported; use PCM or floats"
        )
    width = bits // 8 * channels
    _check(len(body) // width if width else 0, rate, channels, limits)
    frames = body[: len(body) // width * width]
    return _floats(frames, tag, bits).reshape(-1, channels), rate


_WIDTHS = {(_PCM, 8), (_PCM, 16), (_PCM, 24), (_PCM, 32), (_FLOAT, 32), (_FLOAT, 64)}


def _wav_chunks(data: bytes) -> tuple[bytes, memoryview]:
    """Return the format and the samples."""
    view, at, head = memoryview(data), 12, b""
    while at + 8 <= len(view):
        name, size = bytes(view[at : at + 4]), int.from_bytes(view[at + 4 : at + 8], "little")
        start, at = at + 8, at + 8 + size + size % 2
        if name == b"fmt ":
            head = bytes(view[start : start + min(size, 64)])
        if name == b"data":
            if size == _UNKNOWN_SIZE:
                size = len(view) - start
            if start + size > len(view):
                raise MediaRefused(f"the WAV is cut off: it has {len(view) - start} of {size} bytes of audio")
            return head, view[start : start + size]
    raise MediaRefused("the WAV is broken or cut off")


def _floats(body: memoryview, tag: int, bits: int) -> NDArray[np.float32]:
    """Full scale is 1, as in libsndfile."""
    if tag == _FLOAT:
        return np.frombuffer(body, dtype="<f4" if bits == 32 else "<f8").astype(np.float32)
    if bits == 8:
        return (np.frombuffer(body, dtype=np.uint8).astype(np.float32) - np.float32(128)) / np.float32(128)
    if bits == 24:
        wide = np.zeros((len(body) // 3, 4), dtype=np.uint8)
        wide[:, 1:] = np.frombuffer(body, dtype=np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) / np.float32(1 << 31)
    scale = np.float32(1 << (bits - 1))
    return np.frombuffer(body, dtype=f"<i{bits // 8}").astype(np.float32) / scale


def decode_with_soundfile(
    data: bytes, name: str, limits: MediaLimits, write: Callable[[NDArray[np.float32]], object]
) -> tuple[int, int]:
    """Decode with soundfile and write one channel, piece by piece; return the samples written and the rate.

    Runs in the child process: its decoders were not built for untrusted input.
    """
    try:
        import soundfile
    except (ImportError, OSError):  # OSError: without its library
        raise MediaTypeUnknown(
            f"this worker has no decoder for {name}; send WAV, or have its operator run: pip install "
            "soundfile"
        ) from None

    class Forward(soundfile.SoundFile):  # type: ignore[misc]
        """Not seekable: soundfile would seek after each piece, and an MP3 continue a little elsewhere."""

        def seekable(self) -> bool:
            return False

    try:
        with Forward(BytesIO(data)) as file:
            rate, channels, written = int(file.samplerate), file.channels, 0
            _check(file.frames, rate, channels, limits)
            while len(samples := file.read(PIECE, dtype="float32", always_2d=True)):
                _check(written + len(samples), rate, channels, limits)  # the header may lie
                write(_one_channel(samples, rate).samples)
                written += len(samples)
            return written, rate
    except soundfile.LibsndfileError as exc:
        raise MediaRefused(f"the {name} is broken or cut off") from exc
