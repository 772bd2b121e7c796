"""A serve file with models of several kinds, all with the fake engine."""

from __future__ import annotations

import io
import json
import shutil
import wave
from pathlib import Path
from typing import Any

from dynamo_vllm.models import demo


def model(folder: Path, architecture: str, **more: Any) -> str:
    """A folder that says what it is for; the fake engine needs no more than its tokenizer."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo.ROOT / "chat" / name, folder / name)
    config = json.loads((demo.ROOT / "chat" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture], **more}))
    return str(folder)


def groups(folder: Path, *names: str) -> Path:
    """A serve file with groups of these names."""
    found = {
        "chat": {"model": model(folder / "c", "Qwen3ForCausalLM"), "fake_engine": {"vocab_size": 10000}},
        "vectors": {
            "model": model(folder / "e", "BertModel"),
            "fake_engine": {"pooling": "embed", "dimensions": 997},
        },
        "ranker": {
            "model": model(folder / "r", "BertForSequenceClassification", num_labels=1),
            "fake_engine": {"pooling": "classify"},
        },
        "hears": {
            "model": model(folder / "h", "WhisperForConditionalGeneration"),
            "fake_engine": {"transcription": True},
        },
    }
    workers = [{"served_model_name": name, "engine": "fake", **found[name]} for name in names]
    file = folder / "serve.yaml"
    file.write_text(json.dumps({"workers": workers}))  # which is YAML too
    return file


def sound(seconds: int = 3) -> bytes:
    """A tone as a WAV file."""
    made = io.BytesIO()
    with wave.open(made, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(16000)
        out.writeframes((bytes(20) + b"\x00\x40" * 10) * seconds * 800)
    return made.getvalue()
