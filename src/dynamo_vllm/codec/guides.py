"""Turns a request's constraint on its answer into a Guide; refuses one that would cost too much."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import GUIDE_KINDS, Guide
from dynamo_vllm.wire_openai import Body, ChatBody, ResponseFormat

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dynamo_vllm.job import AnswerParser
    from dynamo_vllm.wire import GuidedDecoding

MAX_GUIDE_CHARACTERS = 2**19
MAX_GUIDE_LEVELS = 50
"""vLLM 0.30 reads a schema on the event loop, in a time that grows with the cube of its depth: 400 levels in
10 KB took 6 s. Within these limits it takes at most 2 s."""


def from_tokens(options: GuidedDecoding | None) -> Guide | None:
    """The one constraint of a tokenised request."""
    if options is None:
        return None
    if options.backend is not None:
        raise InvalidRequest(
            "clients may not choose the backend; leave it out", parameter="guided_decoding_backend"
        )
    tag = options.structural_tag
    is_object = options.json is True or options.json == {} or options.json == "{}"
    guide = Guide(
        json=None if is_object or isinstance(options.json, bool) else options.json,
        json_object=True if is_object else None,
        regex=options.regex,
        choice=options.choice,
        grammar=options.grammar,
        structural_tag=json.dumps(tag) if isinstance(tag, dict) else tag,
        whitespace_pattern=options.whitespace_pattern,
    )
    return _one_constraint(guide, "guided_decoding")


def from_text(body: Body) -> Guide | None:
    """The one constraint of an OpenAI body: response_format or a guided_* field."""
    schema, is_object, tag = _response_format(body.response_format)
    guide = Guide(
        json=schema if schema is not None else body.guided_json,
        json_object=is_object,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
        structural_tag=tag,
        whitespace_pattern=body.guided_whitespace_pattern,
    )
    return _one_constraint(guide, "response_format")


def with_tool_calls(own: Guide | None, body: Body, parser: AnswerParser | None) -> Guide | None:
    """Combine the constraints of tool calls and text: a required call wins, otherwise the client's own."""
    if parser is None or not isinstance(body, ChatBody):
        return own
    for_calls = _one_constraint(parser.guide, "tools") if parser.guide is not None else None
    must_call = body.tool_choice not in (None, "none", "auto")
    return for_calls or own if must_call else own or for_calls


def _response_format(chosen: ResponseFormat | None) -> tuple[Any, bool | None, str | None]:
    match chosen:
        case None | ResponseFormat(type="text"):
            return None, None, None
        case ResponseFormat(type="json_object"):
            return None, True, None
        case ResponseFormat(type="json_schema", json_schema={"schema": dict() as schema}):
            return schema, None, None
        case ResponseFormat(type="structural_tag", format=dict() as form):
            return None, None, json.dumps({"type": "structural_tag", "format": form})
        case ResponseFormat(type="structural_tag", structures=list() as parts, triggers=list() as triggers):
            tag = {"type": "structural_tag", "structures": parts, "triggers": triggers}
            return None, None, json.dumps(tag)
    raise InvalidRequest(f"type {chosen.type!r} is unknown or incomplete", parameter="response_format")


def _one_constraint(guide: Guide, parameter: str) -> Guide | None:
    named = [kind for kind in GUIDE_KINDS if getattr(guide, kind) is not None]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)} cannot be combined; give one", parameter=parameter)
    if guide.choice is not None and (not guide.choice or "" in guide.choice):
        raise InvalidRequest("choices must be a list of non-empty strings", parameter="guided_choice")
    _refuse_costly(guide)
    return guide


def _refuse_costly(guide: Guide) -> None:
    value = next(value for kind in GUIDE_KINDS if (value := getattr(guide, kind)) is not None)
    too_deep = InvalidRequest(
        f"nested deeper than {MAX_GUIDE_LEVELS} levels; use $defs and $ref", parameter=guide.parameter
    )
    match value:
        case str():
            length = len(value)
        case bool():
            return
        case [*choices]:
            length = sum(map(len, choices))
        case _:
            length = len(json.dumps(value, ensure_ascii=False))
    if length > MAX_GUIDE_CHARACTERS:
        raise InvalidRequest(
            f"has {length} characters; at most {MAX_GUIDE_CHARACTERS} are allowed", parameter=guide.parameter
        )
    schema = guide.json if guide.json is not None else guide.structural_tag
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        raise too_deep from None
    except ValueError:
        return  # the engine reports it
    if _is_deeper(schema, MAX_GUIDE_LEVELS):
        raise too_deep


def _is_deeper(value: object, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for item in layer for inner in _children(item)]
    return bool(layer)


def _children(item: object) -> Iterable[object]:
    match item:
        case dict():
            return item.values()
        case list():
            return item
    return ()
