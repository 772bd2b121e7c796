"""The runtime's token protocol: the request a worker receives and the chunks it sends back.

Unknown fields are ignored, so that a newer frontend can talk to an older worker; a known field of the
wrong type is refused with its path.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from dynamo_vllm.errors import InvalidRequest


class StopConditions(msgspec.Struct, frozen=True):
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class GuidedDecoding(msgspec.Struct, frozen=True):
    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None
    backend: str | None = None


class SamplingOptions(msgspec.Struct, frozen=True):
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    seed: int | None = None
    include_stop_str_in_output: bool | None = None
    guided_decoding: GuidedDecoding | None = None
    logit_bias: dict[int, float] | None = None


class OutputOptions(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    formatted_prompt: bool | None = None
    return_tokens_as_token_ids: bool | None = None


class Routing(msgspec.Struct, frozen=True):
    dp_rank: int | None = None
    priority: int | None = None
    lora_name: str | None = None
    cache_salt: str | None = None


class TraceLink(msgspec.Struct, frozen=True):
    """A mark in a worker's first chunk; the frontend returns it when the request moves."""

    trace_id: str
    span_id: str


class PrefillResult(msgspec.Struct, frozen=True):
    """What a prefill worker handed over, through the frontend."""

    disaggregated_params: Any = None


class RemoteMemory(msgspec.Struct, frozen=True):
    """A piece of the frontend's memory, as NIXL calls it."""

    addr: int
    size: int
    mem_type: str


class DecodedMedia(msgspec.Struct, frozen=True):
    """What the frontend decoded, with `media_decoder` in the model card."""

    nixl_metadata: str
    nixl_descriptor: RemoteMemory
    shape: list[int]
    dtype: str


class MediaPart(msgspec.Struct, frozen=True):
    """One image, video or audio, in one of the forms the frontend (1.6.1) sends.

    By default it sends the client's URL; the pixels only when the model card asks it to decode.
    """

    url: str | None = msgspec.field(default=None, name="Url")
    decoded: DecodedMedia | None = msgspec.field(default=None, name="Decoded")
    uuid_only: str | None = msgspec.field(default=None, name="UuidOnly")
    """A part without content, only with a name that the client used before."""


class ExtraArgs(msgspec.Struct, frozen=True):
    mm_hashes: list[str | None] | None = None
    """The frontend's names for the images: 64-bit hashes of their URLs, not of their content."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """One request, tokenised by the frontend."""

    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]]
    model: str | None = None
    stop_conditions: StopConditions = StopConditions()
    sampling_options: SamplingOptions = SamplingOptions()
    output_options: OutputOptions = OutputOptions()
    eos_token_ids: list[int] | None = None
    annotations: list[str] | None = None
    routing: Routing | None = None
    prefill_result: PrefillResult | None = None
    migration_link: TraceLink | None = None
    multi_modal_data: dict[str, list[MediaPart]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None
    prompt_embeds: str | None = None
    extra_args: ExtraArgs | None = None
    is_health_check: bool = msgspec.field(default=False, name="_HEALTH_CHECK")


def parse(raw: object) -> GenerateRequest:
    """The request as a struct; a field of the wrong type raises InvalidRequest with the field's path."""
    try:
        return msgspec.convert(raw, GenerateRequest)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(describe(exc)) from exc


def routed_rank(request: object) -> int:
    """Return the data-parallel rank that the router chose; 0 for a request that has none."""
    routing = getattr(request, "routing", None)
    return (routing.dp_rank or 0) if isinstance(routing, Routing) else 0


def describe(exc: msgspec.ValidationError) -> str:
    """Return msgspec's message after the path of the field: 'stop_conditions.max_tokens: …'."""
    text, _, where = str(exc).partition(" - at `")
    # The path of a bad key reads "key` in `$.path".
    path = where.removeprefix("key` in `").rstrip("`").lstrip("$.")
    of_key = "a key: " if where.startswith("key`") else ""
    return f"{path or 'request'}: {of_key}{text[:1].lower()}{text[1:]}"


Chunk = dict[str, Any]
"""What goes back: token_ids (required), index, finish_reason, stop_reason, completion_usage, log_probs,
top_logprobs, cum_log_probs. A plain dict, because one is made per token."""

PREPARING: Chunk = {"token_ids": [], "index": 0, "stage": "preparing"}
PREPARED: Chunk = {"token_ids": [], "index": 0, "stage": "prepared"}
"""Sent by a worker that reports its stages to another one; a caller that does not know them ignores them."""


# --- a request that moves to another worker -------------------------------------------------------------

_MARK = b"dynamo-vllm-prom".hex()


def prompt_mark(prompt_tokens: int) -> dict[str, str]:
    """The frontend keeps the last `worker_trace_link` of a stream and puts it into the request when it moves.

    Such a request has the answer so far appended to its prompt and no other information; with this mark
    the next worker knows where the prompt ended.
    """
    return {"trace_id": _MARK, "span_id": f"{prompt_tokens:016x}"}


def has_moved(request: GenerateRequest) -> bool:
    """Whether another worker has begun the answer."""
    return request.migration_link is not None and request.migration_link.trace_id == _MARK


def prompt_length(request: GenerateRequest, total: int) -> int:
    """Return how many of the engine's `total` tokens are the prompt; a lost worker generated the rest."""
    if request.prompt_embeds is not None:
        return total - len(request.token_ids)
    link = request.migration_link
    if link is None or not has_moved(request):
        return total
    try:
        marked = int(link.span_id, 16)
    except ValueError:
        return total
    return marked if 0 < marked <= total else total
