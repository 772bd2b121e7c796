"""Small requests of every kind, in the format of a role: a worker sends them to itself before it serves.

A kind is whatever has separate code in an engine, and so something that its first request builds. Their
prompts repeat one token that every model accepts, and have a cache salt: no client's prompt hits them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynamo_vllm.roles.media import KEYS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dynamo_vllm.job import EngineFacts
    from dynamo_vllm.media.base import Kind

TOKENS = 2
"""Tokens of each answer: one of the prompt's step, one of a later step."""
SHORT = 24
LONGER = 4
"""Factor from each of the longer prompts to the next."""
_BEYOND_ONE_STEP = 64
_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_GUIDES: Mapping[str, Any] = {
    "json": _SCHEMA,
    "regex": "[a-z]{8}",
    "choice": ["yes", "no"],
    "grammar": 'root ::= "a" root | "b"',
}
_LOGPROBS = (1, 3, 7, 15, 20)
"""On a GPU vLLM 0.30 compiles a kernel for each power of two that holds so many, and the token's own."""
_TOOL = {"type": "function", "function": {"name": "a", "parameters": _SCHEMA}}
# Each alone: some samplers have a kernel for every combination of them.
_SAMPLING: Mapping[str, Mapping[str, Any]] = {
    "temperature": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "top-k and top-p": {"top_k": 5, "top_p": 0.9},
    "min-p": {"min_p": 0.05},
    "seed": {"seed": 1},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "several choices": {"n": 2},
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One small request, in the form `Role.parse` accepts."""

    kind: str
    request: dict[str, Any]
    prompt_tokens: int | None = None
    """Of the longer prompts."""


@dataclass(frozen=True, slots=True)
class Medium:
    """A small image or audio."""

    kind: Kind
    url: str
    marks: tuple[int, ...]
    """The prompt that has a place for it."""


@dataclass(frozen=True, slots=True)
class TrialInputs:
    """The parts for creating trials, besides the engine's facts."""

    salt: str
    """A different one for each start."""
    media: tuple[Medium, ...] = ()
    embeds: str | None = None
    """A prompt as embeddings, if the engine accepts them."""


@dataclass(frozen=True, slots=True)
class Trials:
    plain: Trial
    short: tuple[Trial, ...] = ()
    longer: Iterable[Trial] = ()
    """Each with a longer prompt that starts with the one before; as long as there is time."""


# --- tokens -----------------------------------------------------------------------------------------------


def of_tokens(facts: EngineFacts, given: TrialInputs) -> Trials:
    def trial(kind: str, **parts: Any) -> Trial:
        return Trial(kind, tokens(facts, f"{given.salt} {kind}", **parts))

    sampled = [trial(kind, sampling={"temperature": 0.8, **options}) for kind, options in _SAMPLING.items()]
    guided = [
        trial(f"guided {kind}", sampling={"guided_decoding": {kind: value}})
        for kind, value in _GUIDES.items()
    ]
    others = [
        trial("logit bias", sampling={"logit_bias": {1: 1.0}}),
        trial("min_tokens", stop={"min_tokens": TOKENS, "stop_token_ids": [1]}),
        *(trial(f"logprobs {count}", output={"logprobs": count}) for count in _LOGPROBS),
        trial("prompt_logprobs", output={"prompt_logprobs": 1}),
    ]
    if given.embeds is not None:
        others.append(trial("prompt_embeds", prompt=(), prompt_embeds=given.embeds))
    return Trials(
        trial("greedy"),
        (*sampled, *others, *guided, *media_trials(facts, given)),
        _longer_tokens(facts, given),
    )


def media_trials(facts: EngineFacts, given: TrialInputs) -> Iterator[Trial]:
    """One for each kind of media."""
    for medium in given.media:
        parts = {KEYS[medium.kind]: [{"Url": medium.url}]}
        salt = f"{given.salt} {medium.kind}"
        yield Trial(medium.kind, tokens(facts, salt, prompt=medium.marks, multi_modal_data=parts))


def tokens(
    facts: EngineFacts,
    salt: str,
    *,
    prompt: Iterable[int] | None = None,
    sampling: Mapping[str, object] | None = None,
    stop: Mapping[str, object] | None = None,
    output: Mapping[str, object] | None = None,
    **more: object,
) -> dict[str, object]:
    return {
        "token_ids": [_token(facts)] * _short(facts) if prompt is None else list(prompt),
        "stop_conditions": {"max_tokens": TOKENS, "ignore_eos": True, **(stop or {})},
        "sampling_options": {"temperature": 0.0, **(sampling or {})},
        "output_options": output or {},
        "routing": {"cache_salt": salt},
        "_HEALTH_CHECK": True,
        **more,
    }


def _longer_tokens(facts: EngineFacts, given: TrialInputs) -> Iterator[Trial]:
    for length in lengths(facts):
        # A salt each, so that none finds its beginning in the cache.
        request = tokens(facts, f"{given.salt} {length}", prompt=[_token(facts)] * length)
        yield Trial(f"prompt of {length} tokens", request, length)


def lengths(facts: EngineFacts) -> Iterator[int]:
    """Up to a prompt that exceeds one step of the engine, or fills the context."""
    most = min(facts.context_length - TOKENS, facts.max_num_batched_tokens + _BEYOND_ONE_STEP)
    length = SHORT * LONGER
    while length < most:
        yield length
        length *= LONGER
    if most > SHORT:
        yield most


def _short(facts: EngineFacts) -> int:
    return max(1, min(SHORT, facts.context_length - TOKENS))


def _token(facts: EngineFacts) -> int:
    """As in a health check."""
    return facts.bos_token_id if facts.bos_token_id is not None else 1


# --- OpenAI bodies ----------------------------------------------------------------------------------------


def of_text(facts: EngineFacts, given: TrialInputs) -> Trials:
    def trial(kind: str, **options: object) -> Trial:
        return Trial(kind, _body(f"{given.salt} {kind}", {"prompt": "a", **options}))

    def chat(kind: str, content: object = "a", **options: object) -> Trial:
        messages = [{"role": "user", "content": content}]
        return Trial(kind, _body(f"{given.salt} {kind}", {"messages": messages, **options}))

    sampled = [trial(kind, temperature=0.8, **options) for kind, options in _SAMPLING.items()]
    guided = [trial(f"guided {kind}", **{f"guided_{kind}": value}) for kind, value in _GUIDES.items()]
    others = [
        trial("logit bias", logit_bias={"1": 1.0}),
        trial("min_tokens", min_tokens=TOKENS, stop_token_ids=[1]),
        *(trial(f"logprobs {count}", logprobs=count) for count in _LOGPROBS),
        trial("stop", stop=["a stop"]),
        chat("chat"),
        chat("chat with tools", tools=[_TOOL]),
    ]
    media = [
        chat(medium.kind, [{"type": KEYS[medium.kind], KEYS[medium.kind]: {"url": medium.url}}])
        for medium in given.media
    ]
    return Trials(trial("greedy"), (*sampled, *others, *guided, *media), _longer_text(facts, given))


def _body(salt: str, options: Mapping[str, Any]) -> dict[str, Any]:
    same = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "_HEALTH_CHECK": True}
    return {**same, "nvext": {"cache_salt": salt}, **options}


def _longer_text(facts: EngineFacts, given: TrialInputs) -> Iterator[Trial]:
    for length in lengths(facts):
        request = _body(f"{given.salt} {length}", {"prompt": [_token(facts)] * length})
        yield Trial(f"prompt of {length} tokens", request, length)
