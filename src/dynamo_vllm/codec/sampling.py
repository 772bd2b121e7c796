"""Turns a request's options into a SamplingSpec; refuses what an engine cannot do, with the field's name."""

from __future__ import annotations

import functools
import math
import struct
from typing import TYPE_CHECKING

from dynamo_vllm.codec import guides
from dynamo_vllm.errors import InvalidRequest
from dynamo_vllm.job import EngineFacts, SamplingSpec
from dynamo_vllm.wire import prompt_length
from dynamo_vllm.wire_openai import Body, ChatBody, parse_extension

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dynamo_vllm.job import AnswerParser
    from dynamo_vllm.wire import GenerateRequest, SamplingOptions

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 256
MAX_BIASES = 512
MAX_CHOICES = 128
MAX_LOGPROBS = 20
_SEED_RANGE = range(-(2**63), 2**63)


def from_tokens(request: GenerateRequest, room: int, facts: EngineFacts) -> SamplingSpec:
    """Return the spec of a tokenised request; `room` is how many tokens still fit after the prompt.

    The frontend handles stop strings in this mode: it has the text, the worker only ids.
    """
    stop, sampling, output = request.stop_conditions, request.sampling_options, request.output_options
    _check_stop_strings(stop.stop or ())
    _refuse_beam_search(sampling)
    ignore_eos = bool(stop.ignore_eos)
    hidden = () if ignore_eos else stop.stop_token_ids_hidden or ()
    default = functools.partial(_or_default, facts.sampling_defaults)
    spec = SamplingSpec(
        n=1 if sampling.n is None else sampling.n,
        temperature=default("temperature", shortest_float(sampling.temperature)),
        top_p=default("top_p", shortest_float(sampling.top_p)),
        top_k=_as_int(default("top_k", sampling.top_k)),
        min_p=default("min_p", shortest_float(sampling.min_p)),
        presence_penalty=default("presence_penalty", shortest_float(sampling.presence_penalty)),
        frequency_penalty=default("frequency_penalty", shortest_float(sampling.frequency_penalty)),
        repetition_penalty=default("repetition_penalty", shortest_float(sampling.repetition_penalty)),
        seed=sampling.seed,
        stop_token_ids=_merge_ids(stop.stop_token_ids or (), stop.stop_token_ids_visible or (), hidden),
        ignore_eos=ignore_eos,
        include_stop_in_output=bool(sampling.include_stop_str_in_output),
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        skip_special_tokens=output.skip_special_tokens is not False,
        guide=guides.from_tokens(sampling.guided_decoding),
        max_thinking_tokens=stop.max_thinking_tokens,
        logit_bias=sampling.logit_bias,
        max_tokens=(most := _max_tokens(stop.max_tokens, room)),
        min_tokens=_min_tokens(
            _remaining_min_tokens(stop.min_tokens, request, facts.context_length - room), most
        ),
    )
    _check(spec, facts.vocab_size)
    return spec


def _remaining_min_tokens(min_tokens: int | None, request: GenerateRequest, total: int) -> int | None:
    """A request that moved here has generated a part of them already; its max_tokens is reduced,
    this is not.
    """
    if min_tokens is None or min_tokens < 0:
        return min_tokens
    return max(0, min_tokens - (total - prompt_length(request, total)))


def from_text(body: Body, room: int, facts: EngineFacts, parser: AnswerParser | None = None) -> SamplingSpec:
    """Return the spec of an OpenAI body; here the engine writes the text and finds the stop strings."""
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    _check_stop_strings(stop)
    _refuse_beam_search(body)
    if isinstance(body, ChatBody):
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    else:
        max_tokens, logprobs = body.max_tokens if body.max_tokens is not None else 16, body.logprobs
    default = functools.partial(_or_default, facts.sampling_defaults)
    spec = SamplingSpec(
        n=1 if body.n is None else body.n,
        temperature=default("temperature", shortest_float(body.temperature)),
        top_p=default("top_p", shortest_float(body.top_p)),
        top_k=_as_int(default("top_k", body.top_k)),
        min_p=default("min_p", shortest_float(body.min_p)),
        presence_penalty=default("presence_penalty", shortest_float(body.presence_penalty)),
        frequency_penalty=default("frequency_penalty", shortest_float(body.frequency_penalty)),
        repetition_penalty=default("repetition_penalty", shortest_float(body.repetition_penalty)),
        seed=body.seed,
        stop=stop,
        stop_token_ids=_merge_ids(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_in_output=bool(body.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False
        and not (parser is not None and parser.reads_special_tokens),
        guide=guides.with_tool_calls(guides.from_text(body), body, parser),
        max_thinking_tokens=parse_extension(body).max_thinking_tokens,
        logit_bias=_parse_bias(body.logit_bias),
        detokenize=True,
        max_tokens=(most := _max_tokens(max_tokens, room)),
        min_tokens=_min_tokens(body.min_tokens, most),
    )
    _check(spec, facts.vocab_size)
    return spec


def _or_default(defaults: Mapping[str, float], name: str, value: float | None) -> float | None:
    """What the client asks for, or else the model's own default."""
    return defaults.get(name) if value is None else value


def _as_int(value: float | None) -> int | None:
    return None if value is None else int(value)


def _max_tokens(max_tokens: int | None, room: int) -> int:
    """What the client asks for, cut to what fits."""
    if max_tokens is not None and max_tokens < 1:
        raise InvalidRequest(f"{max_tokens} is below 1; use 1 or more", parameter="max_tokens")
    return room if max_tokens is None else min(max_tokens, room)


def _min_tokens(min_tokens: int | None, most: int) -> int:
    if min_tokens is not None and min_tokens < 0:
        raise InvalidRequest(f"{min_tokens} is negative; use 0 or more", parameter="min_tokens")
    return min(min_tokens or 0, most)


def _check(s: SamplingSpec, vocab_size: int) -> None:
    _check_range("n", s.n, 1, MAX_CHOICES)
    _check_range("temperature", s.temperature, 0, 2)
    _check_range("top_p", s.top_p, 0, 1)
    if s.top_p == 0:
        raise InvalidRequest("0 leaves no token to choose; use a number above 0", parameter="top_p")
    if s.top_k is not None and s.top_k < -1:
        raise InvalidRequest(f"{s.top_k} is below -1; use -1 or 0 for all tokens", parameter="top_k")
    _check_range("min_p", s.min_p, 0, 1)
    _check_range("presence_penalty", s.presence_penalty, -2, 2)
    _check_range("frequency_penalty", s.frequency_penalty, -2, 2)
    _check_range("repetition_penalty", s.repetition_penalty, 0, 2)
    if s.repetition_penalty == 0:
        raise InvalidRequest("0 is not allowed; use a number above 0", parameter="repetition_penalty")
    if s.seed is not None and s.seed not in _SEED_RANGE:
        raise InvalidRequest(f"{s.seed} does not fit into 64 bits", parameter="seed")
    _check_range("logprobs", s.logprobs, 0, MAX_LOGPROBS)
    _check_range("prompt_logprobs", s.prompt_logprobs, 0, MAX_LOGPROBS)
    _check_count("stop_token_ids", len(s.stop_token_ids), MAX_STOP_TOKENS)
    check_vocabulary("stop_token_ids", s.stop_token_ids, vocab_size)
    if s.logit_bias is not None:
        _check_count("logit_bias", len(s.logit_bias), MAX_BIASES)
        check_vocabulary("logit_bias", s.logit_bias, vocab_size)
        for value in s.logit_bias.values():
            _check_range("logit_bias", value, -100, 100)
    if s.max_thinking_tokens is not None and s.max_thinking_tokens < 0:
        raise InvalidRequest(
            f"{s.max_thinking_tokens} is negative; use 0 or more", parameter="max_thinking_tokens"
        )


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:  # also false for NaN
        raise InvalidRequest(f"{value} is not between {low} and {high}", parameter=name)


def _check_count(name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(f"{count} tokens; at most {most} are allowed", parameter=name)


def check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    """Refuse ids the model does not have; the engine would read beyond its embedding table."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"{wrong} is not in the vocabulary of {vocab_size} tokens", parameter=name)


def _check_stop_strings(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(f"{len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed", parameter="stop")
    if (longest := max(map(len, stop), default=0)) > MAX_STOP_CHARACTERS:
        raise InvalidRequest(
            f"a string of {longest} characters; at most {MAX_STOP_CHARACTERS} are allowed", parameter="stop"
        )
    if "" in stop:
        raise InvalidRequest("a stop string is empty; leave it out", parameter="stop")


def _refuse_beam_search(options: SamplingOptions | Body) -> None:
    if options.use_beam_search:
        raise InvalidRequest("beam search is not supported; leave it out", parameter="use_beam_search")
    if options.length_penalty not in (None, 1.0):
        raise InvalidRequest(
            "beam search, which uses it, is not supported; leave it out", parameter="length_penalty"
        )
    if options.best_of is not None and options.best_of != (options.n or 1):
        raise InvalidRequest(
            "vLLM generates exactly n choices; set best_of to n or leave it out", parameter="best_of"
        )


def _merge_ids(*groups: Sequence[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for group in groups for token in group))


def _parse_bias(raw: Mapping[str, float] | None) -> dict[int, float] | None:
    if raw is None:
        return None
    try:
        return {int(token): value for token, value in raw.items()}
    except ValueError:
        raise InvalidRequest("keys must be token ids", parameter="logit_bias") from None


def shortest_float(value: float | None) -> float | None:
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
