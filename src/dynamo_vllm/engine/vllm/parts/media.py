"""Puts media into prompts with vLLM's processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMClientError
from vllm.multimodal.inputs import MultiModalFieldElem
from vllm.transformers_utils.processor import get_video_processor_cls_name

from dynamo_vllm.engine.encoder_cache.folder import Unusable
from dynamo_vllm.engine.vllm.parts import sound as vllm_sound
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
    """How many of each kind the model takes in one prompt, by the user's --limit-mm-per-prompt too."""
    processor = renderer.mm_processor
    if processor is None:
        return {}
    allowed = processor.info.allowed_mm_limits
    return {kind: allowed[kind] for kind in KINDS if allowed.get(kind)}


class VllmMedia:
    """Makes room for media in the prompts of one engine."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def frame_chooser(self) -> FrameChooser | None:
        return vllm_video.frame_chooser(get_video_processor_cls_name(self._renderer.model_config))

    def placeholders(self) -> dict[str, list[int]]:
        """As vLLM's own profiling has them: no chat template is needed."""
        dummies, tokenizer = self._renderer.mm_processor.dummy_inputs, self._renderer.get_tokenizer()
        return {
            kind: list(tokenizer.encode(dummies.get_dummy_text({kind: 1}))) for kind in limits(self._renderer)
        }

    async def process(self, prompt: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Every mark in the prompt as many tokens as its medium takes, and the media as tensors beside it."""
        renderer = self._renderer
        data: dict[str, list[Any]] = {}
        names: dict[str, list[str]] = {}
        for medium in media:
            data.setdefault(medium.kind, []).append(medium.data)
            names.setdefault(medium.kind, []).append(medium.name)
        encoded = [medium.data for medium in media if isinstance(medium.data, Encoded)]
        if encoded and len(encoded) != len(media):
            raise Unusable("some media are encoded and some are not")
        if not encoded and "audio" in data:
            vllm_sound.refuse(renderer.mm_processor.info, data["audio"])
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
            if encoded:  # pixels may do better
                raise Unusable(str(refusal(exc, media))) from exc
            raise refusal(exc, media) from exc
        if encoded:
            _check_rows(made, [medium.kind for medium in media], encoded)
        return MediaPrompt(made["prompt_token_ids"], plain, tuple(media), made, _size(made["mm_kwargs"]))


def _size(made: Any) -> int:
    """Bytes of the tensors in what vLLM's processors made; media that the engine has come without."""
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
    """The items of one kind in the form this model's processor takes.

    vLLM 0.30 believes the grid of an item: it sizes the prompt by it, and reads as many rows.
    """
    fields = info.data_parser.embedding_fields.get(kind, {})
    tensors = [item.tensor for item in items]
    if not fields:
        return tensors
    if set(fields) != {f"{kind}_embeds", f"{kind}_grid_thw"}:
        raise Unusable(f"this model wants {sorted(fields)} of each {kind}")
    merge = info.get_hf_config().vision_config.spatial_merge_size
    grids = [_grid(item, f"{kind}_grid_thw", merge) for item in items]
    return {f"{kind}_embeds": torch.cat(tensors), f"{kind}_grid_thw": torch.tensor(grids)}


def _grid(item: Encoded, field: str, merge: int) -> list[int]:
    """Of a picture: one frame, and sides that the model can merge; the engine ends over any other."""
    match item.about.get(field):
        case [1, int(h), int(w)] | [[1, int(h), int(w)]] if h > 0 and w > 0:
            if h % merge == 0 == w % merge and h * w == len(item.tensor) * merge**2:
                return [1, h, w]
    raise Unusable(f"{field} {item.about.get(field)!r} does not fit {len(item.tensor)} rows")


def _check_rows(made: Any, kinds: Sequence[str], encoded: Sequence[Encoded]) -> None:
    """As many rows as places in the prompt; otherwise the engine would end."""
    places = {kind: iter(made["mm_placeholders"].get(kind, ())) for kind in set(kinds)}
    for kind, item in zip(kinds, encoded, strict=True):
        place = next(places[kind], None)
        count = 0 if place is None else place.get_num_embeds()
        if count != len(item.tensor):
            raise Unusable(f"{len(item.tensor)} rows for {count} places in the prompt")


def refusal(exc: Exception, media: Sequence[Media]) -> DynamoVllmError:
    """Why the media cannot be taken: they were decoded before, so the rest is between model and client.

    vLLM 0.30: the reason of a processor's error is its cause; its own text is a dump of the data.
    """
    kinds = " and ".join(sorted({medium.kind for medium in media}))
    reason = exc.__cause__ or exc
    match exc:
        case VLLMClientError():
            text = str(exc.args[0]) if exc.args else str(exc)
        case RuntimeError() | AssertionError() if "prompt" in str(exc):
            text = f"the prompt has no place for every {kinds}; does the chat template write their marks?"
        case ValueError() if isinstance(reason, ValueError | TypeError | IndexError | ZeroDivisionError):
            why = next(iter(str(reason).splitlines()), type(reason).__name__)
            text = f"the model's processor does not take the {kinds}: {why[:_REASON_LENGTH]}"
        case _:
            return EngineRequestFailed(f"{kinds}: {type(reason).__name__}")
    return InvalidRequest(text, parameter="messages")
