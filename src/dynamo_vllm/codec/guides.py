"""From a request's constraint on its answer to a Guide, refusing what would cost too much."""

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
"""vLLM 0.30 reads a schema on the event loop, in a time that grows with the third power of its depth: of 400
levels in 10 KB it took 6 s, of what these limits let through 2 s at most."""


def of_tokens(options: GuidedDecoding | None) -> Guide | None:
    """The one constraint of a tokenised request."""
    if options is None:
        return None
    if options.backend is not None:
        raise InvalidRequest(
            "the worker chooses the backend; leave it out", parameter="guided_decoding_backend"
        )
    tag = options.structural_tag
    is_object = options.json is True or options.json == {} or options.json == "{}"
    made = Guide(
        json=None if is_object or isinstance(options.json, bool) else options.json,
        json_object=True if is_object else None,
        regex=options.regex,
        choice=options.choice,
        grammar=options.grammar,
        structural_tag=json.dumps(tag) if isinstance(tag, dict) else tag,
        whitespace_pattern=options.whitespace_pattern,
    )
    return _one_constraint(made, "guided_decoding")


def of_text(body: Body) -> Guide | None:
    """The one constraint of an OpenAI body: response_format or a guided_* field."""
    schema, is_object, tag = _response_format(body.response_format)
    made = Guide(
        json=schema if schema is not None else body.guided_json,
        json_object=is_object,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
        structural_tag=tag,
        whitespace_pattern=body.guided_whitespace_pattern,
    )
    return _one_constraint(made, "response_format")


def with_calls(own: Guide | None, body: Body, parser: AnswerParser | None) -> Guide | None:
    """A call that the client insists on comes before its constraint, which is for texts."""
    if parser is None or not isinstance(body, ChatBody):
        return own
    of_calls = _one_constraint(parser.guide, "tools") if parser.guide is not None else None
    must_call = body.tool_choice not in (None, "none", "auto")
    return of_calls or own if must_call else own or of_calls


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


def _one_constraint(made: Guide, parameter: str) -> Guide | None:
    named = [kind for kind in GUIDE_KINDS if getattr(made, kind) is not None]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequest(f"{' and '.join(named)} exclude each other; give one", parameter=parameter)
    if made.choice is not None and (not made.choice or "" in made.choice):
        raise InvalidRequest("choices must be a list of non-empty strings", parameter="guided_choice")
    _refuse_costly(made)
    return made


def _refuse_costly(made: Guide) -> None:
    value = next(value for kind in GUIDE_KINDS if (value := getattr(made, kind)) is not None)
    too_deep = InvalidRequest(
        f"nested deeper than {MAX_GUIDE_LEVELS} levels; use $defs and $ref", parameter=made.parameter
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
            f"has {length} characters; at most {MAX_GUIDE_CHARACTERS} are taken", parameter=made.parameter
        )
    schema = made.json if made.json is not None else made.structural_tag
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
    except RecursionError:
        raise too_deep from None
    except ValueError:
        return  # the engine has the words for it
    if _is_deeper(schema, MAX_GUIDE_LEVELS):
        raise too_deep


def _is_deeper(value: object, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for item in layer for inner in _inside(item)]
    return bool(layer)


def _inside(item: object) -> Iterable[object]:
    match item:
        case dict():
            return item.values()
        case list():
            return item
    return ()
