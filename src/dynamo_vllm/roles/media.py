"""Finds the media of a request, checks whether this worker accepts them, and puts them into the prompt.

How they arrive (frontend 1.6.1). In token mode the chat template leaves one placeholder per media item in the
prompt, and `multi_modal_data` has the URLs by kind, in order. The engine replaces a placeholder by the item's
tokens. With `--frontend-decoding` a description of the pixels replaces the URL; they are read from the
frontend's memory. `input_audio` does not arrive at all, but the chat template sees it and renders an empty
prompt (`models.media_template`). In text mode the client's messages arrive unchanged.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from dynamo_vllm.engine.patches.kv_events import ROUTED
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import Media
from dynamo_vllm.media.base import MAX_CHANNELS, Audio, MediaRef, Pixels, Video
from dynamo_vllm.media.held_bytes import holding
from dynamo_vllm.wire_openai import ChatBody

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dynamo_vllm.engine.base import MediaProcessor
    from dynamo_vllm.job import EngineFacts, MediaPrompt
    from dynamo_vllm.media.base import Kind, MediaItem, MediaLoader
    from dynamo_vllm.wire import DecodedMedia, GenerateRequest
    from dynamo_vllm.wire_openai import Body

_KINDS: Mapping[str, Kind] = {"image_url": "image", "video_url": "video", "audio_url": "audio"}
KEYS: Mapping[Kind, str] = {kind: key for key, kind in _KINDS.items()}
_PLURALS = {"image": "images", "video": "videos", "audio": "audio parts"}
_ROUTING_NAME = re.compile("[0-9a-f]{16}")
_PROCESSED_AT_ONCE = 2
"""vLLM 0.30 processes media in one thread; one more item is prepared meanwhile."""
_AUDIO_FORMAT = re.compile("[a-zA-Z0-9.+-]{1,20}")


class Reader(Protocol):
    """Puts the media of a request into its prompt."""

    def refuse(self, refs: Sequence[MediaRef]) -> None:
        """Refuse what this worker cannot accept, before anything is fetched."""

    async def read(
        self,
        ids: Sequence[int],
        refs: Sequence[MediaRef],
        salt: str | None,
        names: Sequence[str] = (),
        job_id: str = "",
    ) -> MediaPrompt:
        """`names` are the frontend's for the images, if it has any; `job_id` is for logs."""


class MediaReader:
    """Fetches media and lets the engine put them into the prompt; without a loader it only refuses."""

    def __init__(
        self, facts: EngineFacts, loader: MediaLoader | None = None, processor: MediaProcessor | None = None
    ) -> None:
        self._limits = facts.media
        self._loader = loader
        self._processor = processor
        self._processing = asyncio.Semaphore(_PROCESSED_AT_ONCE)

    async def read(
        self,
        ids: Sequence[int],
        refs: Sequence[MediaRef],
        salt: str | None,
        names: Sequence[str] = (),
        job_id: str = "",
    ) -> MediaPrompt:
        return await self.put_into_prompt(ids, await self.load(refs, salt, names))

    async def put_into_prompt(self, ids: Sequence[int], media: Sequence[Media]) -> MediaPrompt:
        """Wait without a limit, as for the engine itself: the held memory is already counted."""
        assert self._processor is not None and self._loader is not None
        memory = self._loader.memory
        with holding() as hold:
            async with memory.turn(hold, (self._processing,)):
                media_prompt = await self._processor.process(ids, media)
                memory.keep(hold, media_prompt, media_prompt.size)
        media_prompt.release = hold.release
        return media_prompt

    async def load(
        self, refs: Sequence[MediaRef], salt: str | None, names: Sequence[str] = ()
    ) -> list[Media]:
        """Return the requested media, decoded and named."""
        self.refuse(refs)
        assert self._loader is not None
        items = await self._loader.load_all(refs)
        image_count = sum(item.kind == "image" for item in items)
        for_router = iter(names if len(names) == image_count else [None] * image_count)
        routing_names = [next(for_router) if item.kind == "image" else None for item in items]
        return [
            Media(item.kind, content(item), name(item, salt, routing_name))
            for item, routing_name in zip(items, routing_names, strict=True)
        ]

    def refuse(self, refs: Sequence[MediaRef]) -> None:
        if not self._limits:
            raise InvalidRequest("this model takes text only; use a vision model", parameter="messages")
        if self._loader is None or self._processor is None:
            raise InvalidRequest(
                "this worker takes text only; it was started without --enable-multimodal",
                parameter="messages",
            )
        for kind, count in Counter(ref.kind for ref in refs).items():
            limit = self._limits.get(kind, 0)
            if limit == 0:
                raise InvalidRequest(f"this model takes no {_PLURALS[kind]}", parameter="messages")
            if count > limit:
                raise InvalidRequest(
                    f"{count} {_PLURALS[kind]} in one request; this worker takes {limit} "
                    "(--limit-mm-per-prompt)",
                    parameter="messages",
                )


def refuse_dropped_audio(ids: Sequence[int], facts: EngineFacts) -> None:
    """See `models.media_template`: nothing else makes the prompt of a chat empty."""
    if not ids and facts.media.get("audio"):
        raise InvalidRequest(
            "the prompt is empty, perhaps because the frontend drops input_audio; send audio_url with a "
            "data: "
            "URL instead, or start the worker with --use-vllm-tokenizer",
            parameter="messages",
        )


def of_tokens(request: GenerateRequest) -> list[MediaRef]:
    """Return the media of a tokenised request, kind by kind."""
    if not request.multi_modal_data:
        return []
    _refuse_settings(request.mm_processor_kwargs, request.media_io_kwargs)
    found = []
    for key, parts in request.multi_modal_data.items():
        kind = _KINDS.get(key)
        if kind is None:
            raise InvalidRequest(f"{key} is an unknown kind of media", parameter="messages")
        for part in parts:
            if part.decoded is not None:
                found.append(MediaRef(kind, "", _pixels(kind, part.decoded)))
                continue
            if part.url is None:
                raise InvalidRequest(_missing_content(key), parameter="messages")
            found.append(MediaRef(kind, part.url))
    return found


def _pixels(kind: Kind, decoded: DecodedMedia) -> Pixels:
    """Return the described image, if it fits its memory."""
    match decoded.shape:
        case [int(height), int(width), int(channels)] if (
            kind == "image"
            and (decoded.dtype, decoded.nixl_descriptor.mem_type) == ("UINT8", "Dram")
            and min(height, width) > 0
            and 1 <= channels <= MAX_CHANNELS
        ):
            pixels = Pixels(height, width, channels, decoded.nixl_descriptor.addr, decoded.nixl_metadata)
            if pixels.size == decoded.nixl_descriptor.size:
                return pixels
    raise InvalidRequest(
        f"{kind} of shape {decoded.shape} and type {decoded.dtype} in {decoded.nixl_descriptor.size} bytes "
        "is not an image that this worker can read",
        parameter="messages",
    )


def _missing_content(key: str) -> str:
    # A client could use a name for content that another client sent.
    return f"{key} without a URL; send the content each time, names (uuid) are not stored"


def _refuse_settings(*settings: Mapping[str, object] | None) -> None:
    fixes = {"mm_processor_kwargs": "; start the worker with --mm-processor-kwargs", "media_io_kwargs": ""}
    for (parameter, fix), value in zip(fixes.items(), settings, strict=True):
        if value:
            # min_pixels alone can make one small image use all memory.
            raise InvalidRequest(f"clients may not set this{fix}", parameter=parameter)


def routing_names(request: GenerateRequest) -> list[str]:
    """Return the frontend's names for the images, in order; none if one of them has none."""
    names = (request.extra_args.mm_hashes if request.extra_args else None) or []
    found = [name for name in names if name and _ROUTING_NAME.fullmatch(name)]
    return found if len(found) == len(names) else []


def name(item: MediaItem, salt: str | None, routing_name: str | None = None) -> str:
    """Return the engine's name for the item in all its caches.

    It identifies the content as we saw it, and whose cache it is in. The frontend's name is only a prefix,
    for the router: it is a short hash of a URL, and a client can make two images share one.
    """
    return routed(
        hashlib.sha256(f"{len(salt or '')}:{salt or ''}:{item.key}".encode()).hexdigest(), routing_name
    )


def routed(own: str, routing_name: str | None) -> str:
    """Return our name with the frontend's before it, if there is one."""
    return own if routing_name is None else f"{routing_name}{ROUTED}{own}"


def content(item: MediaItem) -> object:
    """Return an item's data as `job.Media` has it."""
    match item.data:
        case Video(frames, metadata):
            return frames, metadata
        case Audio(samples, rate):
            return samples, rate
        case image:
            return image


# --- OpenAI messages (text mode) --------------------------------------------------------------------------


def of_text(body: Body) -> list[MediaRef]:
    """Return the media of a chat's messages, in order; raises for parts that are neither text nor media."""
    if not isinstance(body, ChatBody):
        return []
    refs = of_messages(body.messages)
    if refs:
        _refuse_settings(body.mm_processor_kwargs, body.media_io_kwargs)
    return refs


def of_messages(messages: Sequence[Mapping[str, Any]]) -> list[MediaRef]:
    """Return the media in messages, in order; raises for parts that are neither text nor media."""
    return [ref for message in messages for part in _parts(message) if (ref := _ref(part)) is not None]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _ref(part: Any) -> MediaRef | None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return None
    if isinstance(kind, str) and kind in _KINDS:
        held = part.get(kind)
        url = held.get("url") if isinstance(held, dict) else held
        if not isinstance(url, str):
            raise InvalidRequest(_missing_content(kind), parameter="messages")
        return MediaRef(_KINDS[kind], url)
    if kind == "input_audio":
        return MediaRef("audio", _audio_url(part.get("input_audio")))
    raise InvalidRequest(
        f"content part {kind!r} is unknown; use text, {', '.join(_KINDS)} or input_audio",
        parameter="messages",
    )


def _audio_url(audio: object) -> str:
    match audio:
        case {"data": str() as data, "format": str() as kind} if _AUDIO_FORMAT.fullmatch(kind):
            return f"data:audio/{kind};base64,{data}"
    raise InvalidRequest("input_audio needs data (base64) and format", parameter="messages")


def with_placeholders(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for the renderer, with a placeholder instead of each URL: it would fetch
    URLs itself.
    """
    return [
        {**message, "content": [_placeholder(part) for part in parts]}
        if (parts := _parts(message))
        else {**message}
        for message in messages
    ]


def _placeholder(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part.get("text")}
    kind = "audio_url" if part["type"] == "input_audio" else part["type"]
    return {"type": kind, kind: None, "uuid": "mark"}
