"""The part of OpenAI bodies that text mode reads; the frontend has checked ranges, we check types again."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.wire import describe

StructT = TypeVar("StructT", bound=msgspec.Struct)


class ResponseFormat(msgspec.Struct, frozen=True):
    type: str
    json_schema: dict[str, Any] | None = None
    format: dict[str, Any] | None = None
    """Of a structural tag; the next two are its older form."""
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class _Sampling(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    logit_bias: dict[str, float] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    stream: bool | None = None
    nvext: dict[str, Any] | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


class ChatBody(_Sampling, frozen=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = msgspec.field(default=None)
    chat_template_args: dict[str, Any] | None = None
    """As the frontend (1.6.1) passes chat_template_kwargs on."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class CompletionBody(_Sampling, frozen=True, kw_only=True):
    prompt: str | list[Any]
    prompt_embeds: Any = None
    logprobs: int | None = None
    echo: bool | None = None


class AgentHints(msgspec.Struct, frozen=True):
    priority: int | None = None


class Extension(msgspec.Struct, frozen=True):
    """What text mode reads of nvext; in token mode the frontend takes it out of the body."""

    cache_salt: str | None = None
    agent_hints: AgentHints | None = None
    max_thinking_tokens: int | None = None

    @property
    def priority(self) -> int:
        """Higher is sooner. A client may also give it as a header, which the frontend puts here."""
        return (self.agent_hints and self.agent_hints.priority) or 0


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that OpenAI's body does not have; the frontend takes them in nvext and as unknown fields."""

    size: str | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    num_frames: int | None = None
    fps: int | None = None


class ImageExtra(msgspec.Struct, frozen=True, kw_only=True):
    media_passthrough: ImageSettings = ImageSettings()


class ImageBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body of /v1/images/generations as the frontend passes it on."""

    prompt: str
    model: str | None = None
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    background: str | None = None
    input_reference: str | None = None
    stream: bool | None = None
    nvext: ImageSettings | None = None
    extra_args: ImageExtra | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


class VideoBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body of /v1/videos as the frontend passes it on."""

    prompt: str
    model: str | None = None
    seconds: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    input_reference: str | None = None
    nvext: ImageSettings | None = None
    extra_args: ImageExtra | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


class SpeechBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body of /v1/audio/speech as the frontend passes it on."""

    input: str
    model: str | None = None
    data_source: str | None = None
    response_format: str | None = None
    speed: float | None = None
    ref_audio: str | None = None
    extra_args: ImageExtra | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


Body = ChatBody | CompletionBody
MediaBody = ChatBody | ImageBody | VideoBody | SpeechBody
_MEDIA_BODIES: dict[str, type[ImageBody | VideoBody | SpeechBody]] = {
    "image": ImageBody,
    "video": VideoBody,
    "audio": SpeechBody,
}


def parse(raw: object) -> Body:
    """A chat body when it has messages, a completion body otherwise."""
    return _convert(raw, ChatBody) if _is_chat(raw) else _convert(raw, CompletionBody)


def parse_media(raw: object, kind: str) -> MediaBody:
    """For a model that generates `kind`: a chat body if it has messages, else the body of that kind."""
    return _convert(raw, ChatBody) if _is_chat(raw) else _convert(raw, _MEDIA_BODIES[kind])


def parse_image_settings(raw: dict[str, object] | None, where: str) -> ImageSettings:
    """Parse the same settings from a field of a chat body."""
    return _convert_field(raw, where, ImageSettings)


def parse_extension(body: Body) -> Extension:
    return _convert_field(body.nvext, "nvext", Extension)


def _convert_field(raw: dict[str, object] | None, where: str, kind: type[StructT]) -> StructT:
    try:
        return msgspec.convert(raw or {}, kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"{where}.{describe(exc)}") from exc


def _is_chat(raw: object) -> bool:
    return isinstance(raw, dict) and "messages" in raw


def _convert(raw: object, kind: type[StructT]) -> StructT:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(describe(exc)) from exc
