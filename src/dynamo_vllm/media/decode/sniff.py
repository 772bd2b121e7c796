"""Detects the format of media from its bytes. Headers, names and data: types are ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dynamo_vllm.errors import MediaTypeUnknown

if TYPE_CHECKING:
    from collections.abc import Callable

    from dynamo_vllm.media.base import Kind


@dataclass(frozen=True, slots=True)
class MediaFormat:
    """One format that we decode. `name` is the decoder's name for it."""

    name: str
    kind: Kind
    matches: Callable[[bytes], bool]


def _starts(*prefixes: bytes) -> Callable[[bytes], bool]:
    return lambda head: head.startswith(prefixes)


def _riff(form: bytes) -> Callable[[bytes], bool]:
    return lambda head: head[:4] == b"RIFF" and head[8:12] == form


def _mp3(head: bytes) -> bool:
    """An ID3 tag, or the first frame: eleven bits of sync, then layer III."""
    return head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2)


# Only containers that carry their own frames: a playlist (HLS, DASH, concat) would make the decoder open
# other files, past every check of ours.
FORMATS = (
    MediaFormat("JPEG", "image", _starts(b"\xff\xd8\xff")),
    MediaFormat("PNG", "image", _starts(b"\x89PNG\r\n\x1a\n")),
    MediaFormat("WEBP", "image", _riff(b"WEBP")),
    MediaFormat("GIF", "image", _starts(b"GIF87a", b"GIF89a")),
    MediaFormat("BMP", "image", _starts(b"BM")),
    MediaFormat("MP4", "video", lambda head: head[4:8] == b"ftyp"),
    MediaFormat("WEBM", "video", _starts(b"\x1aE\xdf\xa3")),
    MediaFormat("AVI", "video", _riff(b"AVI ")),
    MediaFormat("WAV", "audio", _riff(b"WAVE")),
    MediaFormat("FLAC", "audio", _starts(b"fLaC")),
    MediaFormat("OGG", "audio", _starts(b"OggS")),
    MediaFormat("MP3", "audio", _mp3),
)
_HEAD = 16
_NAMED = {  # sent by mistake or on purpose; only for the message
    "SVG, which may contain scripts": re.compile(rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?<svg", re.S | re.I),
    "HTML": re.compile(rb"\s*(<!doctype html|<html|<head|<body|<script)", re.I),
    "PDF": re.compile(rb"%PDF-"),
    "a playlist": re.compile(rb"\s*#EXTM3U"),
    "TIFF": re.compile(rb"II\*\0|MM\0\*"),
    "an AVIF or HEIF image": re.compile(rb"....ftyp(avif|avis|heic|heix|mif1|msf1)", re.S),
    "compressed": re.compile(rb"\x1f\x8b|PK\x03\x04|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd"),
}
_IMAGE_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_POLYGLOT_MARKS = re.compile(rb"%PDF-|<!doctype html|<html|<script|<svg|<\?php", re.I)
_POLYGLOT_BYTES = 1024  # as far as browsers and PDF readers look for their own start
_ZIP_END, _ZIP_END_BYTES, _ZIP_COMMENT = b"PK\x05\x06", 22, 1 << 16


def sniff(data: bytes, kind: Kind) -> MediaFormat:
    """Return the format of `data`, which must be of `kind`; raises MediaTypeUnknown."""
    found = next((item for item in FORMATS if item.matches(data[:_HEAD])), None)
    if found is not None and found.name == "MP4" and data[8:12] in _IMAGE_BRANDS:
        found = None
    if found is None:
        named = next(
            (name for name, pattern in _NAMED.items() if pattern.match(data[:_POLYGLOT_BYTES])), None
        )
        found_type = f"this is {named}" if named else "the format is unknown"
        raise MediaTypeUnknown(f"{found_type}; {_supported(kind)}")
    if found.kind != kind:
        raise MediaTypeUnknown(f"this is {found.kind} ({found.name}); {_supported(kind)}")
    if kind == "image" and _is_polyglot(data):
        raise MediaTypeUnknown(f"this is {found.name} and also a document of another type")
    return found


def _supported(kind: Kind) -> str:
    names = [item.name for item in FORMATS if item.kind == kind]
    return f"supported for {kind}: {', '.join(names[:-1])} and {names[-1]}"


def _is_polyglot(data: bytes) -> bool:
    """A polyglot: an image that other programs read as a page, a PDF or an archive."""
    if _POLYGLOT_MARKS.search(data, 0, _POLYGLOT_BYTES):
        return True
    tail = data[-_ZIP_END_BYTES - _ZIP_COMMENT :]
    at = tail.rfind(_ZIP_END)
    if at < 0 or len(tail) - at < _ZIP_END_BYTES:
        return False
    comment = int.from_bytes(tail[at + 20 : at + 22], "little")
    return at + _ZIP_END_BYTES + comment == len(tail)
