"""Creates tiny vision models with random weights: LLaVA, Qwen2-VL, Qwen2.5-VL and Qwen3-VL.

Each is what vLLM and transformers take for a model of its family, with about a million parameters. They say
nonsense in the words of `tiny`, other nonsense for every image. No torch and no transformers here either:
the names and shapes of the weights are written down.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from dynamo_vllm.models import tiny
from tiny_models.vision_base import HIDDEN
from tiny_models.vision_llava import LLAVA
from tiny_models.vision_qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from tiny_models.vision_base import Family

REVISION = 2
"""Increase it with every change of the files' content, also for `sound`."""
FAMILY_KEY = "dynamo_vllm_tiny_family"
_SEED = 7
_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}
{{- message['content'] }}
{%- elif message['content'] %}
{%- for part in message['content'] %}
{%- if part['type'] == 'text' %}
{{- part['text'] }}
{%- elif part['type'] in ('image', 'image_url') %}
{{- '@IMAGE@' }}
{%- elif part['type'] in ('video', 'video_url') %}
{{- '@VIDEO@' }}
{%- elif part['type'] in ('audio', 'audio_url') %}
{{- '@AUDIO@' }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def make_tiny_vision_model(folder: Path, family: str) -> Path:
    """Create a model of one of `FAMILIES` in `folder`; a folder that has it is left as it is."""
    return make(folder, family, FAMILIES[family])


def make(folder: Path, name: str, family: Family) -> Path:
    """The same for any family; its name tells the folders of families apart."""
    mark = {tiny.REVISION_KEY: REVISION, FAMILY_KEY: name}
    kind = tiny.Kind(
        files=(*tiny.FILES, *family.processors),
        write=functools.partial(_write_files, made=family, mark=mark),
        mark=mark,
    )
    return tiny.make(folder, kind)


def _write_files(folder: Path, made: Family, mark: Mapping[str, object]) -> None:
    from safetensors.numpy import save_file

    specials = (*tiny.SPECIAL_TOKENS, *made.specials)
    template = _TEMPLATE
    for name, marks in (("@IMAGE@", made.image), ("@VIDEO@", made.video), ("@AUDIO@", made.audio)):
        template = template.replace(name, marks)
    vocabulary = tiny.write_tokenizer(folder, specials, template)
    tiny.write_json(folder / "config.json", {**made.config(vocabulary), **mark, "torch_dtype": "float32"})
    tiny.write_json(folder / "generation_config.json", tiny.token_ids())
    for name, content in made.processors.items():
        tiny.write_json(folder / name, content)
    weights = _weights(made, vocabulary, specials)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(
    family: Family, vocabulary: Mapping[str, int], specials: Sequence[str]
) -> dict[str, NDArray[np.float32]]:
    """Random, but for what keeps lone blanks and special tokens out of answers, as in `tiny`.

    The first component of the stream is 1 everywhere and nothing adds to it: a bias for the head.
    """
    import numpy as np

    random = np.random.default_rng(_SEED)

    def spread(name: str, shape: tuple[int, ...]) -> float:
        if "embed_tokens" in name:
            return 0.5
        if "lm_head" in name:
            return 0.06
        return 1.2 / float(np.sqrt(np.prod(shape[1:])))

    weights: dict[str, NDArray[np.float32]] = {}
    for name, shape in family.shapes(len(vocabulary)):
        if "norm" in name or "ln_q" in name:
            value = np.full(shape, float(name.endswith("weight")), np.float32)
        elif name.endswith("bias"):
            value = np.zeros(shape, np.float32)
        else:
            value = random.standard_normal(shape, np.float32) * np.float32(spread(name, shape))
        weights[name] = value
        if name.endswith(("embed_tokens.weight",)):
            value[:, 0] = 1.0
        elif name.endswith(("o_proj.weight", "mlp.down_proj.weight")) and shape[0] == HIDDEN:
            value[0] = 0.0
        elif name.endswith("lm_head.weight"):
            ends = vocabulary[tiny.TURN_END]
            silent = [vocabulary[token] for token in specials if vocabulary[token] != ends]
            value[tiny.blanks(vocabulary) + silent, 0] = -20.0
    for layer in (*family.projections, *family.additions):
        weights[f"{layer}.weight"][0] = 0.0
    for layer in family.projections:
        weights[f"{layer}.bias"][0] = 1.0
    return weights


FAMILIES: Mapping[str, Family] = {
    "llava": LLAVA,
    "qwen2-vl": QWEN2_VL,
    "qwen2.5-vl": QWEN2_5_VL,
    "qwen3-vl": QWEN3_VL,
}
