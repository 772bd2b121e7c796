"""Turns a request's options into a SamplingSpec; refuses what an engine cannot do, with the field's name."""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import GUIDE_KINDS, EngineFacts, Guide, SamplingSpec
from dynamo_vllm.wire import prompt_length
from dynamo_vllm.wire_openai import Body, ChatBody, ResponseFormat, extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.job import AnswerParser
    from dynamo_vllm.wire import GenerateRequest, GuidedDecoding, SamplingOptions

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 512
MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_GUIDE_CHARACTERS = 2**19
MAX_GUIDE_LEVELS = 50
"""vLLM 0.30 parses a schema on the event loop, in a time that grows with the third power of its depth: 6 s
for 400 levels in 10 KB, at most 2 s within these limits."""
_MODEL_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_SEED_RANGE = range(-(2**63), 2**63)


def from_tokens(request: GenerateRequest, room: int, facts: EngineFacts) -> SamplingSpec:
    """Return the spec of a tokenised request; `room` is how many tokens still fit after the prompt.

    The frontend handles stop strings in this mode: it has the text, the worker only ids.
    """
    stop, sampling, output = request.stop_conditions, request.sampling_options, request.output_options
    _stop_strings(stop.stop or ())
    _beam_search(sampling)
    ignore_eos = bool(stop.ignore_eos)
    hidden = () if ignore_eos else stop.stop_token_ids_hidden or ()
    return spec(
        room=room,
        facts=facts,
        max_tokens=stop.max_tokens,
        min_tokens=_still_to_come(stop.min_tokens, request, facts.context_length - room),
        n=sampling.n,
        temperature=rounded(sampling.temperature),
        top_p=rounded(sampling.top_p),
        top_k=sampling.top_k,
        min_p=rounded(sampling.min_p),
        presence_penalty=rounded(sampling.presence_penalty),
        frequency_penalty=rounded(sampling.frequency_penalty),
        repetition_penalty=rounded(sampling.repetition_penalty),
        seed=sampling.seed,
        stop_token_ids=_merged(stop.stop_token_ids or (), stop.stop_token_ids_visible or (), hidden),
        ignore_eos=ignore_eos,
        include_stop_in_output=bool(sampling.include_stop_str_in_output),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        skip_special_tokens=output.skip_special_tokens is not False,
        guide=guide(sampling.guided_decoding),
        max_thinking_tokens=stop.max_thinking_tokens,
        logit_bias=sampling.logit_bias,
    )


def _still_to_come(min_tokens: int | None, request: GenerateRequest, whole: int) -> int | None:
    """A request that moved here has generated a part of them already; its max_tokens is reduced,
    this is not.
    """
    if min_tokens is None or min_tokens < 0:
        return min_tokens
    return max(0, min_tokens - (whole - prompt_length(request, whole)))


def from_text(body: Body, room: int, facts: EngineFacts, parser: AnswerParser | None = None) -> SamplingSpec:
    """Return the spec of an OpenAI body; here the engine writes the text and finds the stop strings."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _stop_strings(stop)
    _beam_search(body)
    if isinstance(body, ChatBody):
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        max_tokens, logprobs = body.max_tokens if body.max_tokens is not None else 16, body.logprobs
    return spec(
        room=room,
        facts=facts,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        n=body.n,
        temperature=rounded(body.temperature),
        top_p=rounded(body.top_p),
        top_k=body.top_k,
        min_p=rounded(body.min_p),
        presence_penalty=rounded(body.presence_penalty),
        frequency_penalty=rounded(body.frequency_penalty),
        repetition_penalty=rounded(body.repetition_penalty),
        seed=body.seed,
        stop=stop,
        stop_token_ids=_merged(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_in_output=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False
        and not (parser is not None and parser.reads_special_tokens),
        guide=_with_calls(text_guide(body), body, parser),
        max_thinking_tokens=extension(body).max_thinking_tokens,
        logit_bias=_bias(body.logit_bias),
        detokenize=True,
    )


def spec(
    *, room: int, facts: EngineFacts, max_tokens: int | None, min_tokens: int | None, **rest: Any
) -> SamplingSpec:
    """Return a checked SamplingSpec. `max_tokens` defaults to what fits and is reduced to it."""
    for name, value in facts.sampling_defaults.items():
        if name in _MODEL_DEFAULTS and rest[name] is None:
            rest[name] = value
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{max_tokens} is not above 0", parameter="max_tokens")
    limit = room if max_tokens is None else min(max_tokens, room)
    if min_tokens is not None and min_tokens < 0:
        raise InvalidRequest(f"{min_tokens} is negative", parameter="min_tokens")
    n = rest.pop("n")
    made = SamplingSpec(
        max_tokens=limit,
        min_tokens=min(min_tokens or 0, limit),
        n=1 if n is None else n,
        **rest,
    )
    _check(made, facts.vocab_size)
    return made


def _check(s: SamplingSpec, vocab_size: int) -> None:
    _within("n", s.n, 1, MAX_CHOICES)
    _within("temperature", s.temperature, 0, 2)
    _within("top_p", s.top_p, 0, 1)
    if s.top_p == 0:
        raise InvalidRequest("0 leaves no token to choose; use a number above 0", parameter="top_p")
    if s.top_k is not None and s.top_k < -1:
        raise InvalidRequest(f"{s.top_k} is below -1; use -1 or 0 for all tokens", parameter="top_k")
    _within("min_p", s.min_p, 0, 1)
    _within("presence_penalty", s.presence_penalty, -2, 2)
    _within("frequency_penalty", s.frequency_penalty, -2, 2)
    _within("repetition_penalty", s.repetition_penalty, 0, 2)
    if s.repetition_penalty == 0:
        raise InvalidRequest("0 is not above 0", parameter="repetition_penalty")
    if s.seed is not None and s.seed not in _SEED_RANGE:
        raise InvalidRequest(f"{s.seed} does not fit into 64 bits", parameter="seed")
    _within("logprobs", s.logprobs, 0, MAX_LOGPROBS)
    _within("prompt_logprobs", s.prompt_logprobs, 0, MAX_LOGPROBS)
    _few("stop_token_ids", len(s.stop_token_ids), MAX_STOP_TOKENS)
    in_vocabulary("stop_token_ids", s.stop_token_ids, vocab_size)
    if s.logit_bias is not None:
        _few("logit_bias", len(s.logit_bias), MAX_BIASES)
        in_vocabulary("logit_bias", s.logit_bias, vocab_size)
        for value in s.logit_bias.values():
            _within("logit_bias", value, -100, 100)
    if s.max_thinking_tokens is not None and s.max_thinking_tokens < 0:
        raise InvalidRequest(f"{s.max_thinking_tokens} is negative", parameter="max_thinking_tokens")


def _within(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # also false for NaN
        raise InvalidRequest(f"{value} is not between {low} and {high}", parameter=name)


def _few(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{count} tokens; at most {most} are allowed", parameter=name)


def in_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids the model does not have; the engine would read beyond its embedding table."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{wrong} is not in the vocabulary of {vocab_size} tokens", parameter=name)


def _stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", parameter="stop")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed", parameter="stop"
        )
    if "" in stop:
        raise InvalidRequest("an empty string would stop at once", parameter="stop")


def _beam_search(options: SamplingOptions | Body) -> None:
    if options.use_beam_search:
        raise InvalidRequest("beam search is not supported; leave it out", parameter="use_beam_search")
    if options.length_penalty not in (None, 1.0):
        raise InvalidRequest("only beam search uses it, which is not supported", parameter="length_penalty")
    if options.best_of is not None and options.best_of != (options.n or 1):
        raise InvalidRequest(
            "vLLM makes exactly n choices; set best_of to n or leave it out", parameter="best_of"
        )


def _merged(*groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for group in groups for token in group))


def _bias(raw: Mapping[str, float] | None) -> dict[int, float] | None:
    if raw is None:
        return None
    try:
        return {int(token): value for token, value in raw.items()}
    except ValueError:
        raise InvalidRequest("its keys must be token ids", parameter="logit_bias") from None


def rounded(value: float | None) -> float | None:
    """Return the shortest decimal that is the same 32-bit float: the frontend turns 0.9 into
    0.8999999761581421.
    """
    if value is None or not math.isfinite(value):
        return value
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if abs(short) < 3e38 and struct.pack("f", short) == struct.pack("f", value):
            return short
    return value


def guide(options: GuidedDecoding | None) -> Guide | None:
    """Return the one constraint of a tokenised request."""
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


def text_guide(body: Body) -> Guide | None:
    """Return the one constraint of an OpenAI body: response_format or a guided_* field."""
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


def _with_calls(own: Guide | None, body: Body, parser: AnswerParser | None) -> Guide | None:
    """A required tool call comes before the client's constraint, which is for texts."""
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
        return  # the engine has a better message
    if _is_deeper(schema, MAX_GUIDE_LEVELS):
        raise too_deep


def _is_deeper(value: Any, levels: int) -> bool:
    layer = [value]
    for _ in range(levels + 1):
        layer = [inner for item in layer for inner in _inside(item)]
    return bool(layer)


def _inside(item: Any) -> Iterable[Any]:
    match item:
        case dict():
            return item.values()
        case list():
            return item
    return ()
