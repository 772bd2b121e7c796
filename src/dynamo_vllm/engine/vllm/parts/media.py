"""Puts media into prompts with vLLM's multimodal processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMClientError
from vllm.multimodal.inputs import MultiModalFieldElem
from vllm.transformers_utils.processor import get_video_processor_cls_name

from dynamo_vllm.engine.encoder_cache.folder import Unusable
from dynamo_vllm.engine.vllm.parts import audio as vllm_audio
from dynamo_vllm.engine.vllm.parts import video as vllm_video
from dynamo_vllm.engine.vllm.parts.encoded import Encoded
from dynamo_vllm.errors import EngineRequestFailed, InvalidRequest
from dynamo_vllm.job import Media, MediaPrompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dynamo_vllm.engine.base import FrameChooser
    from dynamo_vllm.engine.vllm.names import Renderer
    from dynamo_vllm.errors import DynamoVllmError

KINDS = ("image", "video", "audio")
_REASON_LENGTH = 200


def limits(renderer: Renderer) -> dict[str, int]:
    """Returns how many items of each kind a prompt may have, from the model and --limit-mm-per-prompt."""
    processor = renderer.mm_processor
    if processor is None:
        return {}
    allowed = processor.info.allowed_mm_limits
    return {kind: allowed[kind] for kind in KINDS if allowed.get(kind)}


class VllmMedia:
    """Puts media into the prompts of one engine."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def frame_chooser(self) -> FrameChooser | None:
        return vllm_video.frame_chooser(get_video_processor_cls_name(self._renderer.model_config))

    def placeholders(self) -> dict[str, list[int]]:
        """Uses the dummy texts of vLLM's profiling, which need no chat template."""
        dummies, tokenizer = self._renderer.mm_processor.dummy_inputs, self._renderer.get_tokenizer()
        return {
            kind: list(tokenizer.encode(dummies.get_dummy_text({kind: 1}))) for kind in limits(self._renderer)
        }

    async def process(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Replaces each placeholder by as many tokens as its item needs, and makes tensors of the items."""
        renderer = self._renderer
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        for item in media:
            data.setdefault(item.kind, []).append(item.data)
            names.setdefault(item.kind, []).append(item.name)
        encoded = [item.data for item in media if isinstance(item.data, Encoded)]
        if encoded and len(encoded) != len(media):
            raise Unusable("some media are encoded and some are not")
        if not encoded and "audio" in data:
            vllm_audio.refuse(renderer.mm_processor.info, data["audio"])
        plain = list(prompt)
        try:
            if encoded:
                info = renderer.mm_processor.info
                data = {kind: _packed(info, kind, items) for kind, items in data.items()}
            given = {"prompt_token_ids": plain, "multi_modal_data": data, "multi_modal_uuids": names}
            (made,) = await renderer.render_cmpl_async([given])
        except Unusable:
            raise
        except Exception as exc:
            if encoded:  # the worker's own encoder may still accept the pixels
                raise Unusable(str(refusal(exc, media))) from exc
            raise refusal(exc, media) from exc
        if encoded:
            _check_rows(made, [item.kind for item in media], encoded)
        return MediaPrompt(made["prompt_token_ids"], plain, tuple(media), made, _size(made["mm_kwargs"]))


def _size(made: Any) -> int:
    """Returns the bytes of the processed tensors; items in the engine's cache have none."""
    match made:
        case torch.Tensor():
            return int(made.nbytes)
        case MultiModalFieldElem():
            return _size(made.data)
        case Mapping():
            return sum(map(_size, made.values()))
        case list() | tuple():
            return sum(map(_size, made))
    return 0


def _packed(info: Any, kind: str, items: Sequence[Any]) -> Any:
    """Returns the items of one kind in the form that this model's processor expects.

    vLLM 0.30 trusts the grid of an item: it computes the number of prompt tokens from it, and reads as many
    rows.
    """
    fields = info.data_parser.embedding_fields.get(kind, {})
    tensors = [item.tensor for item in items]
    if not fields:
        return tensors
    if set(fields) != {f"{kind}_embeds", f"{kind}_grid_thw"}:
        raise Unusable(f"this model needs {sorted(fields)} of each {kind}")
    merge = info.get_hf_config().vision_config.spatial_merge_size
    grids = [_grid(item, f"{kind}_grid_thw", merge) for item in items]
    return {f"{kind}_embeds": torch.cat(tensors), f"{kind}_grid_thw": torch.tensor(grids)}


def _grid(item: Encoded, field: str, merge: int) -> list[int]:
    """Returns the grid of an image: one frame, with sides that the model can merge. Others crash vLLM."""
    match item.about.get(field):
        case [1, int(h), int(w)] | [[1, int(h), int(w)]] if h > 0 and w > 0:
            if h % merge == 0 == w % merge and h * w == len(item.tensor) * merge**2:
                return [1, h, w]
    raise Unusable(f"{field} {item.about.get(field)!r} does not fit {len(item.tensor)} rows")


def _check_rows(made: Any, kinds: Sequence[str], encoded: Sequence[Encoded]) -> None:
    """Checks that there are as many rows as placeholder tokens; a difference would crash the engine."""
    places = {kind: iter(made["mm_placeholders"].get(kind, ())) for kind in set(kinds)}
    for kind, item in zip(kinds, encoded, strict=True):
        place = next(places[kind], None)
        count = 0 if place is None else place.get_num_embeds()
        if count != len(item.tensor):
            raise Unusable(f"{len(item.tensor)} rows for {count} placeholder tokens in the prompt")


def refusal(exc: Exception, media: Sequence[Media]) -> DynamoVllmError:
    """Returns our error for media that vLLM refuses; they are decoded already, so it is the client's error.

    vLLM 0.30: the reason for a processor's error is its cause; its own text is a dump of the data.
    """
    kinds = " and ".join(sorted({item.kind for item in media}))
    reason = exc.__cause__ or exc
    match exc:
        case VLLMClientError():
            text = str(exc.args[0]) if exc.args else str(exc)
        case RuntimeError() | AssertionError() if "prompt" in str(exc):
            text = f"the prompt lacks a placeholder for every {kinds}; does the chat template write them?"
        case ValueError() if isinstance(reason, ValueError | TypeError | IndexError | ZeroDivisionError):
            why = next(iter(str(reason).splitlines()), type(reason).__name__)
            text = f"the model's processor refuses the {kinds}: {why[:_REASON_LENGTH]}"
        case _:
            return EngineRequestFailed(f"{kinds}: {type(reason).__name__}")
    return InvalidRequest(text, parameter="messages")
