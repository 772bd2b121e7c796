"""Generates a tiny text model with random weights that vLLM loads as an ordinary Qwen3.

It answers nonsense, but in whole readable words: every token id decodes to plain ASCII, so a stream never
shows half a character. All printable ASCII characters are tokens of their own, which lets a grammar (JSON,
regex) steer it. Nothing here imports torch or transformers: a model is ready in well under a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import string
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

REVISION_KEY = "dynamo_vllm_tiny_revision"
REVISION = 1
"""Increase it with every change of the files: a folder of an older revision is then generated again."""

PAD_TOKEN, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD_TOKEN, TURN_START, TURN_END)
PAD_ID, TURN_START_ID, TURN_END_ID = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] if part['type'] == 'text' %}
{{- part['text'] }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

_HIDDEN = 256
_INTERMEDIATE = 512
_LAYERS = 4
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 64
_MAX_POSITIONS = 4096
_SEED = 20
_BLANKS = " \t\n\r"


@dataclass(frozen=True, slots=True)
class Kind:
    """A model that can be generated: how its files are written, and how its folder is recognised."""

    files: tuple[str, ...]
    write: Callable[[Path], None]
    mark: Mapping[str, object]
    """Part of config.json; a folder whose mark has the same names and another value is generated again."""


def make_tiny_model(folder: Path) -> Path:
    """Generate the model in `folder` and return it; an existing one is left as it is."""
    return make(folder, Kind(FILES, _write_files, {REVISION_KEY: REVISION}))


def make(folder: Path, kind: Kind) -> Path:
    """Create all files at once with a rename, so that processes may race for the same folder."""
    folder = Path(folder)
    if _holds_model(folder, kind):
        return folder
    if folder.exists() and any(folder.iterdir()) and _mark(folder, kind) is None:
        raise FileExistsError(f"{folder} contains something other than a tiny model; give a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One scratch folder beside the target: a rename is atomic only within a file system.
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new = Path(scratch, "new")
        new.mkdir()
        kind.write(new)
        _move_into_place(new, folder, kind, aside=Path(scratch, "old"))
    return folder


def _holds_model(folder: Path, kind: Kind) -> bool:
    return _mark(folder, kind) == kind.mark and all((folder / name).is_file() for name in kind.files)


def _mark(folder: Path, kind: Kind) -> dict[str, object] | None:
    """Return the mark of the tiny model in `folder`; None if there is no tiny model of this kind."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return {name: config[name] for name in kind.mark}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _move_into_place(new: Path, folder: Path, kind: Kind, aside: Path) -> None:
    if not _holds_model(folder, kind) and _mark(folder, kind) is not None:  # outdated, or a file was lost
        with contextlib.suppress(FileNotFoundError):  # another process has just moved it
            os.replace(folder, aside)
    try:
        os.replace(new, folder)
    except OSError:
        if not _holds_model(folder, kind):  # otherwise another process was faster, with the same files
            raise


def _write_files(folder: Path) -> None:
    from safetensors.numpy import save_file

    vocabulary = write_tokenizer(folder, SPECIAL_TOKENS, CHAT_TEMPLATE)
    write_json(folder / "config.json", _config(len(vocabulary)))
    write_json(folder / "generation_config.json", token_ids())
    save_file(_weights(vocabulary), folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(folder: Path, specials: Sequence[str], template: str) -> dict[str, int]:
    """Write the tokenizer's files with `specials` as the first tokens; return token → id."""
    vocabulary, merges = _vocabulary(specials)
    write_json(folder / "tokenizer.json", _tokenizer(vocabulary, merges, specials))
    write_json(folder / "tokenizer_config.json", _tokenizer_config(template))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return vocabulary


def write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def token_ids() -> dict[str, object]:
    return {"bos_token_id": PAD_ID, "eos_token_id": TURN_END_ID, "pad_token_id": PAD_ID}


def _config(vocab_size: int) -> dict[str, object]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **token_ids(),
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": _INTERMEDIATE,
        "max_position_embeddings": _MAX_POSITIONS,
        "num_attention_heads": _HEADS,
        "num_hidden_layers": _LAYERS,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": vocab_size,
        REVISION_KEY: REVISION,
    }


def _weights(vocabulary: dict[str, int]) -> dict[str, NDArray[np.float32]]:
    import numpy as np

    random = np.random.default_rng(_SEED)

    def matrix(rows: int, columns: int, spread: float = 0.08) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), dtype=np.float32) * np.float32(spread)

    def into_stream(columns: int) -> NDArray[np.float32]:
        weight = matrix(_HIDDEN, columns)
        weight[0] = 0.0  # leaves the constant of the embeddings alone, see below
        return weight

    def norm(size: int) -> NDArray[np.float32]:
        return np.ones(size, dtype=np.float32)

    # With the usual spread of 0.02 everywhere the last token alone decides and greedy text soon repeats one
    # word; this wide, attention matters: a lost token or a wrong KV block changes the text.
    embedding, head = matrix(len(vocabulary), _HIDDEN, 0.5), matrix(len(vocabulary), _HIDDEN, 0.04)
    # The first component is the same for all tokens and so gives the head a bias: against lone blanks (a JSON
    # grammar allows any number, greedy text would never leave them) and specials that end nothing (no text).
    embedding[:, 0] = 1.0
    head[blanks(vocabulary) + [PAD_ID, TURN_START_ID], 0] = -20.0
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": norm(_HIDDEN),
        "lm_head.weight": head,
    }
    for index in range(_LAYERS):
        layer = {
            "input_layernorm": norm(_HIDDEN),
            "self_attn.q_proj": matrix(_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.k_proj": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.v_proj": matrix(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.o_proj": into_stream(_HEADS * _HEAD_DIM),
            "self_attn.q_norm": norm(_HEAD_DIM),
            "self_attn.k_norm": norm(_HEAD_DIM),
            "post_attention_layernorm": norm(_HIDDEN),
            "mlp.gate_proj": matrix(_INTERMEDIATE, _HIDDEN),
            "mlp.up_proj": matrix(_INTERMEDIATE, _HIDDEN),
            "mlp.down_proj": into_stream(_INTERMEDIATE),
        }
        weights |= {f"model.layers.{index}.{name}.weight": value for name, value in layer.items()}
    return weights


def blanks(vocabulary: Mapping[str, int]) -> list[int]:
    """Return the ids of lone blanks."""
    return [vocabulary[_spelling(blank)] for blank in _BLANKS]


def _vocabulary(specials: Sequence[str]) -> tuple[dict[str, int], list[list[str]]]:
    """Return token → id, and the BPE merges from characters to syllables to words of two syllables.

    Words carry their leading space, as in real vocabularies, so that random ids read as a sentence.
    """
    space = _spelling(" ")
    tokens = [*specials, *(_spelling(c) for c in _single_characters())]
    merges: list[list[str]] = []

    def merge(left: str, right: str) -> str:
        merges.append([left, right])
        tokens.append(left + right)
        return left + right

    syllables = [merge(consonant, vowel) for consonant in "bdfglmnprstv" for vowel in "aeiou"]
    openings = [merge(space, syllable) for syllable in syllables]
    endings = [syllable for syllable in syllables if syllable[0] in "lmr"]
    for opening in openings:
        for ending in endings:
            merge(opening, ending)
    return {token: index for index, token in enumerate(tokens)}, merges


def _single_characters() -> str:
    return string.digits + string.ascii_letters + string.punctuation + _BLANKS


def _spelling(character: str) -> str:
    """Return how a byte-level tokenizer spells an ASCII character: blanks and controls move up by 256."""
    return character if character.isprintable() and character != " " else chr(ord(character) + 256)


def _tokenizer(
    vocabulary: dict[str, int], merges: list[list[str]], specials: Sequence[str]
) -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index, token in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            # Bytes of other alphabets are not tokens (they would decode to broken text) and are read as "?".
            "unk_token": "?",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def _tokenizer_config(template: str) -> dict[str, object]:
    return {
        "add_bos_token": False,
        "bos_token": PAD_TOKEN,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": _MAX_POSITIONS,
        "pad_token": PAD_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
