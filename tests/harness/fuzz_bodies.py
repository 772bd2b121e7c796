"""Bodies of requests for a fuzz test, after the types of OpenAI and Anthropic; `fuzz_odd` has what is odd."""

from __future__ import annotations

import collections.abc
import functools
import types
import typing
from typing import Any

import typing_extensions
from anthropic.types import message_count_tokens_params, message_create_params
from hypothesis import strategies as st
from openai.types import (
    completion_create_params,
    embedding_create_params,
    image_generate_params,
    video_create_params,
)
from openai.types.audio import speech_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import input_token_count_params, response_create_params

from harness.fuzz_odd import ANY, DEEP, NUMBERS, ODD, SMALL, TEXTS, WORDS

Body = dict[str, Any]

SCHEMAS = st.sampled_from(
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "additionalProperties": False},
        {"$ref": "#"},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "string", "pattern": "(a+)+$"},
        {"type": "string", "minLength": 10**9},
        {"type": "array", "items": {"type": "number"}, "minItems": 10**6},
        {"anyOf": [{"const": i} for i in range(300)]},
        {"enum": []},
        {"type": "no such type"},
        {},
    ]
)

# --- valid bodies, from the types of the openai package -------------------------------------------------

OWN: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.sampled_from([None, 1, 2, 5, 40, 10**6]),
    "max_completion_tokens": st.sampled_from([None, 1, 2, 5, 40, 10**6]),
    "max_output_tokens": st.sampled_from([None, 1, 5, 40]),
    "n": st.sampled_from([1, 1, 2, 3, 128]),
    "top_logprobs": st.sampled_from([0, 1, 5, 20]),
    "logit_bias": st.dictionaries(st.integers(0, 1100).map(str), st.integers(-100, 100), max_size=5),
    "stop": st.none()
    | st.text(min_size=1, max_size=4)
    | st.lists(st.text(min_size=1, max_size=5), max_size=5),
    "schema": SCHEMAS,
    "parameters": SCHEMAS,
    "temperature": st.floats(0, 2, allow_nan=False),
    "top_p": st.floats(0.01, 1, allow_nan=False),
    "url": st.sampled_from([text for text in TEXTS if ":" in text]),
    "size": st.sampled_from(["64x64", "128x64", "60x60", "0x0", "99999x8"]),
    "stream": st.booleans(),
}
"""Fields whose type says too little for a request that is taken, in any object of that name."""
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"), st.booleans()),
    **dict.fromkeys(("guided_regex", "guided_grammar", "cache_salt"), WORDS),
    "top_k": st.sampled_from([-1, 0, 1, 50, 10**6]),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.1, 2),
    "min_tokens": st.sampled_from([0, 1, 5, 300]),
    "prompt_logprobs": st.sampled_from([0, 1, 20]),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop_token_ids": st.lists(st.integers(-1, 1100), max_size=3),
    "guided_json": SCHEMAS | DEEP,
    "guided_choice": st.lists(WORDS, max_size=3),
    "response_format": st.builds(
        lambda kind, schema: {"type": kind, "json_schema": {"name": "a", "schema": schema}, "format": schema},
        st.sampled_from(["text", "json_object", "json_schema", "structural_tag", "other"]),
        SCHEMAS | DEEP,
    ),
    "chat_template_kwargs": st.dictionaries(WORDS, ANY, max_size=3),
    "nvext": st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("greed_sampling", "ignore_eos", "use_raw_prompt"), st.booleans()),
            **dict.fromkeys(("max_thinking_tokens", "top_k", "backend_instance_id"), st.integers(0, 9)),
            **dict.fromkeys(("agent_hints", "routing_constraints"), st.none() | st.just({}) | ANY),
            "token_data": st.lists(st.integers(0, 1200), max_size=4),
            "annotations": st.lists(st.sampled_from(["formatted_prompt", "token_ids", "no such"])),
            "extra_fields": st.lists(st.sampled_from(["worker_id", "timing", "no such"])),
            "cache_salt": WORDS,
        },
    ),
}
"""What vLLM and Dynamo take beside OpenAI's fields."""
DRAWING: dict[str, st.SearchStrategy[Any]] = {
    "nvext": st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("num_inference_steps", "num_frames", "fps", "seed"), st.integers(0, 60)),
            "guidance_scale": st.floats(0, 10),
            "negative_prompt": WORDS,
        },
    ),
    **dict.fromkeys(("seed", "num_inference_steps", "num_frames", "fps"), st.integers(-1, 60)),
    "guidance_scale": NUMBERS,
}


@functools.cache
def of_type(hint: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Values of a type of the openai package as JSON; one it does not know may be anything."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if typing_extensions.is_typeddict(hint):
        return of_fields(hint, depth)
    if origin in (typing.Required, typing.NotRequired, typing.Annotated):
        return of_type(arguments[0], depth)
    if origin in (typing.Union, types.UnionType):
        return st.deferred(lambda: st.one_of([of_type(argument, depth) for argument in arguments]))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), ANY, max_size=3)
    if origin is not None and issubclass(origin, collections.abc.Iterable):
        return st.deferred(lambda: st.lists(of_type(arguments[0], depth), max_size=2 if depth else 4))
    plain = {str: WORDS, int: SMALL, float: st.floats(-2, 2), bool: st.booleans(), type(None): st.none()}
    return plain.get(hint, ANY)


def of_fields(kind: Any, depth: int) -> st.SearchStrategy[Body]:
    hints = typing.get_type_hints(kind, include_extras=True)
    needed = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Required}
    optional = sorted(hints.keys() - needed)

    @st.composite
    def made(draw: st.DrawFn) -> Body:
        names = needed | (draw(st.sets(st.sampled_from(optional), max_size=6 - depth)) if optional else set())
        if depth > 4:
            names = names & needed
        return {
            name: draw(OWN[name] if name in OWN else of_type(hints[name], depth + 1))
            for name in sorted(names)
        }

    return made()


Fields = dict[str, st.SearchStrategy[Any]]


def valid(kind: Any, more: Fields | None = None, **own: st.SearchStrategy[Any]) -> st.SearchStrategy[Body]:
    """Bodies of a type; `own` fields are in all of them, of `more` there are some."""

    @st.composite
    def made(draw: st.DrawFn) -> Body:
        body: Body = {**draw(of_type(kind)), **{name: draw(values) for name, values in own.items()}}
        for name in draw(st.lists(st.sampled_from(sorted(more or ["user"])), max_size=3)):
            body[name] = draw((more or {"user": WORDS})[name])
        return body

    return made()


TALK = st.just([{"role": "user", "content": "count to three"}])
"""Messages that every template takes: else few would come to a worker."""
PROMPT = st.text(min_size=1, max_size=12) | st.lists(st.integers(0, 999), min_size=1, max_size=6)
TALKS = st.sampled_from(["tiny"] * 4 + ["text"] * 4 + ["image", "video", "audio", "no such"])
TELLS = st.sampled_from(["tiny", "tiny", "text", "text", "no such"])
CHAT = chat_create_params.CompletionCreateParamsNonStreaming
PLAIN = st.fixed_dictionaries({"model": TELLS}, optional=dict.fromkeys(("input", "documents"), ODD))
IMAGE = image_generate_params.ImageGenerateParamsNonStreaming
VIDEO = video_create_params.VideoCreateParams
RESPONSE = response_create_params.ResponseCreateParamsNonStreaming
MESSAGE = message_create_params.MessageCreateParamsNonStreaming
STREAM = OWN["stream"]
BODIES: dict[str, st.SearchStrategy[Body]] = {
    "/v1/chat/completions": valid(CHAT, SAMPLING, model=TALKS, stream=STREAM, messages=TALK)
    | valid(CHAT, SAMPLING, model=TALKS, stream=STREAM),
    "/v1/completions": valid(
        completion_create_params.CompletionCreateParamsNonStreaming,
        SAMPLING,
        model=TELLS,
        stream=STREAM,
        prompt=PROMPT,
    ),
    "/v1/responses": valid(RESPONSE, model=TALKS, stream=STREAM, input=WORDS)
    | valid(RESPONSE, model=TALKS, stream=STREAM),
    "/v1/responses/input_tokens": valid(input_token_count_params.InputTokenCountParams, model=TELLS),
    "/v1/messages": valid(MESSAGE, model=TALKS, stream=STREAM, messages=TALK, max_tokens=SMALL)
    | valid(MESSAGE, model=TALKS, stream=STREAM),
    "/v1/messages/count_tokens": valid(message_count_tokens_params.MessageCountTokensParams, model=TELLS),
    "/v1/embeddings": valid(embedding_create_params.EmbeddingCreateParams, model=TELLS),
    "/v1/classify": PLAIN,
    "/v1/pooling": PLAIN,
    "/v1/rerank": PLAIN,
    "/v1/images/generations": valid(IMAGE, DRAWING, model=st.just("image"), prompt=WORDS),
    "/v1/images/edits": valid(
        IMAGE, DRAWING, model=st.just("image"), prompt=WORDS, input_reference=OWN["url"]
    ),
    "/v1/videos": valid(VIDEO, DRAWING, model=st.just("video"), prompt=WORDS, seconds=SMALL),
    "/v1/videos/stream": valid(VIDEO, DRAWING, model=st.just("video"), prompt=WORDS, seconds=SMALL),
    "/v1/audio/speech": valid(
        speech_create_params.SpeechCreateParams, DRAWING, model=st.just("audio"), input=WORDS, voice=WORDS
    ),
}
"""By route: every POST that docs/security.md has as open."""


# --- what workers answer without the frontend, through a gateway ------------------------------------------

ASKED = st.sampled_from(["ranker"] * 3 + ["embedder"] * 3 + ["tiny", "no such"])
SOME = WORDS | st.fixed_dictionaries({"text": WORDS}) | ANY
SEVERAL = SOME | st.lists(SOME, max_size=4)
SHORTENING: dict[str, st.SearchStrategy[Any]] = {
    **dict.fromkeys(("truncate_prompt_tokens", "max_tokens_per_doc", "max_tokens_per_query"), SMALL),
    "truncation_side": st.sampled_from(["left", "right", "up"]),
    "use_activation": st.booleans(),
    "priority": NUMBERS,
    "cache_salt": WORDS,
    "nvext": ODD,
    "_api": WORDS,
    "_HEALTH_CHECK": st.booleans(),
}


def pooled(needed: dict[str, st.SearchStrategy[Any]], **more: st.SearchStrategy[Any]) -> Any:
    return st.fixed_dictionaries({"model": ASKED, **needed}, optional=SHORTENING | more)


RANKED = pooled(
    {"query": SOME, "documents": SEVERAL}, top_n=SMALL, return_documents=st.booleans(), instruction=WORDS
)
OF_WORKERS: dict[str, st.SearchStrategy[Body]] = {
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), RANKED),
    **dict.fromkeys(
        ("/v1/score", "/score"),
        st.sampled_from(["text_1 text_2", "queries documents", "queries items", "data_1 data_2"]).flatmap(
            lambda names: pooled(dict.fromkeys(names.split(), SEVERAL))
        ),
    ),
    "/v2/embed": pooled(
        {"texts": st.lists(WORDS, max_size=4) | ODD},
        embedding_types=st.lists(st.sampled_from(["float", "base64", "binary", "ubinary", "int8"])) | ODD,
        output_dimension=SMALL,
        truncate=st.sampled_from(["NONE", "START", "END"]) | ODD,
        max_tokens=SMALL,
    ),
    "/v1/embeddings": pooled({"messages": TALK | ODD}, encoding_format=WORDS, dimensions=SMALL, input=ODD),
}
"""By route of the gateway."""
