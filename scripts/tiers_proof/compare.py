"""Compares the answers of an engine with tiers to those of one without."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tiers_proof.requests import Ask, Phase

SOURCES = ("host", "disk", "peer", "external_unspecified")
"""vLLM's names of tiers; `device` is its own cache."""


@dataclass
class Outcome:
    """What came of one case with one tier."""

    requests: int = 0
    loaded: int = 0
    """Tokens that came from a tier, of all phases."""
    sources: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    worst: float = 0.0
    """The largest difference of two log-probabilities."""
    tolerance: float = 0.0
    """The largest that counts as equal."""
    ties: int = 0
    """Answers that differ where two tokens were as good as equally probable; what follows is not compared."""
    wrong: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    """Phases in which nothing was loaded although something had to be, or the other way round."""

    @property
    def verdict(self) -> str:
        return "WRONG" if self.wrong else "NOT SHOWN" if self.empty else "equal"


def compare(
    phases: Sequence[Phase], wanted: Mapping[str, Any], found: Mapping[str, Any], tolerance: float
) -> Outcome:
    outcome = Outcome(tolerance=tolerance)
    for phase, right, given in zip(phases, wanted["phases"], found["phases"], strict=True):
        figures = given["figures"]
        loaded = {source: figures[source] for source in SOURCES if figures.get(source)}
        for source, count in loaded.items():
            outcome.sources[source] = outcome.sources.get(source, 0) + count
        outcome.loaded += sum(loaded.values())
        outcome.preemptions += figures.get("num_preemptions", 0)
        if phase.loads is not None and phase.loads != bool(loaded):
            outcome.empty.append(f"{phase.name}: {sum(loaded.values())} tokens came from a tier")
        if right["answers"].keys() != given["answers"].keys():
            outcome.wrong.append(f"{phase.name}: other requests were answered")
        for name in right["answers"].keys() & given["answers"].keys():
            outcome.requests += 1
            _compare_answers(
                f"{phase.name} {name}", right["answers"][name], given["answers"][name], tolerance, outcome
            )
    return outcome


def add(total: Outcome, more: Outcome) -> None:
    """Adds the outcome of one more engine."""
    total.worst, total.tolerance = max(total.worst, more.worst), max(total.tolerance, more.tolerance)
    for source, count in more.sources.items():
        total.sources[source] = total.sources.get(source, 0) + count
    for name in ("requests", "loaded", "preemptions", "ties", "wrong", "empty"):
        setattr(total, name, getattr(total, name) + getattr(more, name))


def contradiction(asked: Sequence[tuple[Sequence[Phase], Mapping[str, Any]]], tolerance: float) -> str | None:
    """Returns where engines without tiers give two answers to one question: they prove nothing then."""
    known: dict[tuple[int, Ask], tuple[str, Any]] = {}
    for phases, found in asked:
        operations = 0
        for phase, given in zip(phases, found["phases"], strict=True):
            operations += phase.before is not None
            for ask in phase.asks:
                answer = given["answers"].get(ask.name)
                question = dataclasses.replace(ask, name="", max_tokens=0, prompt=tuple(ask.prompt))
                if answer is None or ask.n > 1:
                    continue
                before, first = known.setdefault((operations, question), (phase.name, answer))
                outcome = Outcome()
                _compare_answers(
                    ask.name, _shorter(first, answer), _shorter(answer, first), tolerance, outcome
                )
                if outcome.wrong:
                    return f"{phase.name} and {before}: {outcome.wrong[0]}"
    return None


def _shorter(answer: Mapping[str, Any], other: Mapping[str, Any]) -> Mapping[str, Any]:
    """Cuts an answer to the length of the other."""
    choices = [
        {name: values[: len(their["tokens"])] for name, values in choice.items()}
        for choice, their in zip(answer["choices"], other["choices"], strict=True)
    ]
    return {**answer, "choices": choices}


def _compare_answers(
    name: str, right: Mapping[str, Any], given: Mapping[str, Any], tolerance: float, outcome: Outcome
) -> None:
    for wanted, found in zip(right["choices"], given["choices"], strict=True):
        _compare_choices(name, wanted, found, tolerance, outcome)
    wanted, found = right["prompt_logprobs"] or [], given["prompt_logprobs"] or []
    if len(wanted) != len(found):
        outcome.wrong.append(f"{name}: {len(found)} log-probabilities of the prompt, not {len(wanted)}")
    for one, other in zip(wanted, found, strict=False):
        if one is not None:
            _difference(name, one, other, tolerance, outcome)


def _compare_choices(
    name: str, right: Mapping[str, Any], given: Mapping[str, Any], tolerance: float, outcome: Outcome
) -> None:
    for at, (token, other) in enumerate(zip(right["tokens"], given["tokens"], strict=False)):
        if token != other:
            if _is_tie(at, right, given, tolerance):
                outcome.ties += 1
            else:
                outcome.wrong.append(f"{name}: token {at} is {other}, not {token}")
            return
        if _difference(
            f"{name} token {at}", right["logprobs"][at], given["logprobs"][at], tolerance, outcome
        ):
            return
    if len(right["tokens"]) != len(given["tokens"]):
        outcome.wrong.append(f"{name}: {len(given['tokens'])} tokens, not {len(right['tokens'])}")


def _is_tie(at: int, right: Mapping[str, Any], given: Mapping[str, Any], tolerance: float) -> bool:
    """Returns whether the two tokens are equally probable, in both engines."""
    wanted, found = dict(right["tops"][at]), dict(given["tops"][at])
    both = right["tokens"][at], given["tokens"][at]
    if not all(token in wanted and token in found for token in both):
        return False
    apart = [abs(wanted[token] - found[token]) for token in both]
    return bool(max(apart) <= tolerance and abs(wanted[both[0]] - wanted[both[1]]) <= 2 * tolerance)


def _difference(name: str, right: float, given: float, tolerance: float, outcome: Outcome) -> bool:
    """Notes a difference and returns whether it is too large."""
    difference = abs(right - given)
    outcome.worst = max(outcome.worst, difference)
    if not difference <= tolerance:  # also what is not a number
        outcome.wrong.append(f"{name}: log-probability {given:.5f}, not {right:.5f}")
        return True
    return False
