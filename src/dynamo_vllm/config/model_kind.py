"""Finds out from a model's folder what it is for, before an engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GENERATE, POOLING, TRANSCRIPTION = "generate", "pooling", "transcription"
# As vLLM reads names of architectures: the first that fits decides.
_ENDINGS = (
    ("WhisperForConditionalGeneration", TRANSCRIPTION),
    ("ForCausalLM", GENERATE),
    ("ForConditionalGeneration", GENERATE),
    ("ChatModel", GENERATE),
    ("LMHeadModel", GENERATE),
    ("ForTextEncoding", POOLING),
    ("EmbeddingModel", POOLING),
    ("ForSequenceClassification", POOLING),
    ("ForTokenClassification", POOLING),
    ("ClassificationModel", POOLING),
    ("ForRewardModeling", POOLING),
    ("RewardModel", POOLING),
    ("Model", POOLING),
)
_WHISPER_POSITIONS = 1500


def kind_of(model: str | None, flags: Mapping[str, object]) -> str:
    """Return generate, pooling or transcription; a model that is not in a folder yet generates.

    vLLM's own flags come first: --runner, and --convert, which makes a pooling model of any other.
    """
    runner, convert = flags.get("runner", "auto"), flags.get("convert", "auto")
    if runner == POOLING or (runner == "auto" and convert not in ("auto", "none")):
        return POOLING
    found = _of_folder(Path(model), flags) if model else GENERATE
    return GENERATE if runner == "generate" and found == POOLING else found


def source_positions(model: str) -> int:
    """Return the tokens of a speech model's longest sound: Whisper's, if its files do not say."""
    found = _config(Path(model)).get("max_source_positions")
    return found if isinstance(found, int) and found > 0 else _WHISPER_POSITIONS


def scores_pairs(model: str | None, flags: Mapping[str, object]) -> bool:
    """Return whether a pooling model scores a pair of texts: it is a classifier with one class."""
    config = {**(_config(Path(model)) if model else {}), **_overrides(flags)}
    labels = config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else config.get("num_labels")
    if "classifier_from_token" in config:  # the difference of two tokens of a language model
        count = 1
    named = config.get("architectures")
    is_classifier = flags.get("convert") == "classify" or any(
        "Classification" in str(name) for name in (named if isinstance(named, list) else ())
    )
    return is_classifier and count == 1


def _of_folder(folder: Path, flags: Mapping[str, object]) -> str:
    overridden = _overrides(flags).get("architectures")
    if overridden is None and (folder / "modules.json").is_file() and (folder / "1_Pooling").is_dir():
        return POOLING  # Sentence Transformers, whatever the architecture
    named = overridden or _config(folder).get("architectures")
    for name in named if isinstance(named, list) else ():
        for ending, kind in _ENDINGS:
            if str(name).endswith(ending):
                return kind
    return GENERATE


def _config(folder: Path) -> dict[str, object]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _overrides(flags: Mapping[str, object]) -> dict[str, object]:
    """Return what --hf-overrides puts over the model's config.json; vLLM refuses a wrong one."""
    try:
        found = json.loads(str(flags.get("hf_overrides") or "{}"))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
