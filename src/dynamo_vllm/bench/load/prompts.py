"""Creates the requests of a stage. Request number n is the same whichever client process sends it."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, Any

import msgspec

from dynamo_vllm.bench.load import trace

if TYPE_CHECKING:
    from collections.abc import Sequence

# Common words: most tokenizers have one token for each of them with a leading space.
_COMMON = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night point "
    "home water room mother area money story fact month lot right study book eye job word business issue "
    "side kind head house service friend father power hour game line end member law car city community name "
    "president team minute idea body information back parent face level office door health person art war "
    "history party result change morning reason research girl guy moment air teacher force education"
)
WORDS = _COMMON.split()
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_encode = msgspec.json.encode


class PromptSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that determines the prompts of a stage."""

    kind: str
    api: str
    model: str
    input_tokens: int
    output_tokens: int
    vocab: tuple[int, int]
    prefix_tokens: int = 0
    prefixes: int = 1
    turns: int = 1
    seed: int = 1
    stage: str = ""
    """Part of the seed, so that no stage finds its prompts in the cache of an earlier one."""
    ignore_eos: bool = True
    more: dict[str, Any] = {}
    """More fields for every request."""
    requests: list[trace.TraceRequest] = []
    """The requests of a trace, if the kind is `trace`."""


def as_random(spec: PromptSpec) -> PromptSpec:
    """Return the specification of random prompts to the same model."""
    return msgspec.structs.replace(spec, kind="random", requests=[])


class Conversation:
    """One conversation; most have a single turn."""

    def __init__(self, spec: PromptSpec, number: int) -> None:
        self._spec = spec
        self._number = number
        self.turns = spec.turns if spec.kind == "turns" else 1
        self._questions: list[str] = []

    @property
    def keeps_text(self) -> bool:
        """Whether the next turn needs the text of the answer."""
        return self.turns > 1

    def next_body(self, answers: Sequence[str]) -> bytes:
        """Return the body of the next request, with all earlier turns."""
        spec, number = self._spec, self._number
        if spec.kind == "turns":
            self._questions.append(
                _words(f"{spec.seed}/{spec.stage}/{number}/{len(answers)}", spec.input_tokens)
            )
            return _turn(spec, self._questions, answers)
        if spec.kind == "trace":
            request = spec.requests[number]
            ids = trace.prompt_ids(request, spec.seed, spec.vocab)
            return _body(spec, ids, request.output_tokens)
        ids = _ids(f"{spec.seed}/{spec.stage}/{number}", spec.input_tokens, spec.vocab)
        if spec.kind == "prefix":
            ids = shared_prefix(spec, number) + ids
        return _body(spec, ids, spec.output_tokens)


def shared_prefix(spec: PromptSpec, number: int) -> list[int]:
    """Return the prefix of request `number`, chosen at random from a few."""
    chosen = random.Random(f"{spec.seed}/{spec.stage}/choice/{number}").randrange(spec.prefixes)
    return _cached_ids(f"{spec.seed}/{spec.stage}/prefix/{chosen}", spec.prefix_tokens, spec.vocab)


@functools.lru_cache(maxsize=256)
def _cached_ids(seed: str, count: int, vocab: tuple[int, int]) -> list[int]:
    return _ids(seed, count, vocab)


def _ids(seed: str, count: int, vocab: tuple[int, int]) -> list[int]:
    return random.Random(seed).choices(range(*vocab), k=count)


def _words(seed: str, count: int) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=count))


def _body(spec: PromptSpec, ids: list[int], output_tokens: int) -> bytes:
    """Return a request with one prompt: the token ids, or for chat one word for each."""
    if spec.api == "chat":
        text = " ".join(WORDS[number % len(WORDS)] for number in ids)
        return _encode(_fields(spec, output_tokens) | {"messages": [{"role": "user", "content": text}]})
    return _encode(_fields(spec, output_tokens) | {"prompt": ids})


def _turn(spec: PromptSpec, questions: Sequence[str], answers: Sequence[str]) -> bytes:
    if spec.api == "chat":
        messages = []
        for number, question in enumerate(questions):
            messages.append({"role": "user", "content": question})
            if number < len(answers):
                messages.append({"role": "assistant", "content": answers[number]})
        return _encode(_fields(spec, spec.output_tokens) | {"messages": messages})
    parts = [part for pair in zip(questions, [*answers, ""], strict=True) for part in pair if part]
    return _encode(_fields(spec, spec.output_tokens) | {"prompt": "\n".join(parts)})


def _fields(spec: PromptSpec, output_tokens: int) -> dict[str, object]:
    fields: dict[str, object] = {
        "model": spec.model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if spec.ignore_eos:
        fields["ignore_eos"] = True
    return fields | spec.more
