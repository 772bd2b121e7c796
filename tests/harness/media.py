"""Small pictures, videos and sounds, made on the spot."""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture(format: str = "PNG", mode: str = "RGB", size: tuple[int, int] = (12, 8), **save: Any) -> bytes:
    """Noise, the same each time."""
    levels = np.random.default_rng(7).integers(0, 256, (size[1], size[0], 4), dtype=np.uint8)
    made = Image.fromarray(levels, "RGBA").convert(mode)
    buffer = io.BytesIO()
    made.save(buffer, format, **save)
    return buffer.getvalue()


def png_that_claims(width: int, height: int) -> bytes:
    """A picture of a few hundred bytes whose header promises any size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(bytes(100_000))), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
        for name, body in chunks
    )


def video(
    folder: Path, name: str = "a.mp4", codec: str = "mp4v", frames: int = 50, rate: float = 10.0
) -> bytes:
    import cv2

    path = folder / name
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), rate, (64, 48))
    assert writer.isOpened()
    for number in range(frames):
        frame = np.full((48, 64, 3), number * 5 % 256, dtype=np.uint8)
        frame[:, : number % 64] = (0, 0, 255)
        writer.write(frame)
    writer.release()
    return path.read_bytes()


def sound(seconds: float = 0.5, rate: int = 8000, channels: int = 1, width: int = 2) -> bytes:
    count = int(seconds * rate) * channels * width
    frames = np.random.default_rng(7).integers(0, 256, count, dtype=np.uint8).tobytes()
    return wav(frames, rate, channels, width)


def wav(frames: bytes, rate: int, channels: int = 1, width: int = 2) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(frames)
    return buffer.getvalue()


def data_url(data: bytes, type: str = "image/png") -> str:
    return f"data:{type};base64,{base64.b64encode(data).decode()}"
