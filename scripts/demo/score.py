"""Scores a model on what it was never trained on, greedily: in torch, or over HTTP as a client sees it.

python scripts/demo score FOLDER             # in torch
python scripts/demo score --url URL          # a running server with the hermes and qwen3 parsers
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from demo.answers import Answer, is_right, parse
from demo.generator.base import Call, Example
from demo.generator.mix import HELD_OUT, held_out
from demo.generator.styles import Style
from demo.model import Qwen3
from demo.template import messages, prompt
from demo.tokenizer import TURN_END

SEED = 1000
"""Another than any that is trained with."""
MAX_TOKENS = 160
GUIDED = "json, guided"
EFFECT = "in its style"
"""Of all answers of an adapter, right or not."""
NEEDED = {
    "sums": 0.97, "tools": 0.95, "product": 0.95, "memory": 0.95, "json": 0.90, GUIDED: 1.0,
    "colour": 0.95, "shape": 0.95, "count": 0.95, "position": 0.95,
}  # fmt: skip
"""What demo-chat and demo-vision must reach; an adapter need only have its effect."""
EFFECT_NEEDED = 0.95

Ask = Callable[[Sequence[Example]], list[Answer]]


@dataclass(frozen=True)
class Score:
    skill: str
    right: int
    count: int
    wrong: tuple[tuple[str, str, str], ...]
    """Some that were not: asked, wanted, answered."""
    needed: float | None = None

    @property
    def share(self) -> float:
        return self.right / self.count

    @property
    def is_enough(self) -> bool:
        return self.share >= (self.needed or 0)


def score(ask: Ask, count: int, skills: Sequence[str] = tuple(HELD_OUT), seed: int = SEED) -> list[Score]:
    return [score_of(ask, skill, list(held_out(skill, seed, count))) for skill in skills]


def score_of(ask: Ask, skill: str, examples: Sequence[Example]) -> Score:
    return judge(skill, examples, ask(examples))


def score_style(ask: Ask, style: Style, count: int, skills: Sequence[str] = ()) -> list[Score]:
    """How well an adapter does what it was trained on, and how often its answers are in its style."""
    scores, counted, others = [], 0, []
    for skill in skills or style.skills:
        examples = style.held_out(skill, SEED, count)
        answers = ask(examples)
        scores.append(dataclasses.replace(judge(skill, examples, answers), needed=None))
        counted += len(answers)
        others += [
            (example.turns[-2].content, example.answer.content, answer.content)
            for example, answer in zip(examples, answers, strict=True)
            if not style.is_in(answer.content)
        ]
    effect = Score(EFFECT, counted - len(others), counted, tuple(others[:5]), EFFECT_NEEDED)
    return [effect, *scores]


def judge(skill: str, examples: Sequence[Example], answers: Sequence[Answer]) -> Score:
    verdicts = [is_right(example, answer) for example, answer in zip(examples, answers, strict=True)]
    wrong = tuple(
        (
            example.turns[-2].content,
            _shown(example.answer.content, example.answer.calls),
            _shown(a.content, a.calls),
        )
        for example, a, right in zip(examples, answers, verdicts, strict=True)
        if not right
    )
    return Score(skill, sum(verdicts), len(verdicts), wrong[:5], NEEDED.get(skill))


def table(scores: Sequence[Score]) -> str:
    lines = ["| skill | right | needed |", "|---|---|---|"]
    for one in scores:
        needed = "" if one.needed is None else f"{one.needed:.0%}"
        lines.append(f"| {one.skill} | {one.share:.1%} of {one.count} | {needed} |")
    return "\n".join(lines)


def in_torch(model: Qwen3, tokenizer: Tokenizer, rows: int = 256, max_tokens: int = MAX_TOKENS) -> Ask:
    """Many at a time; short prompts with short ones."""
    end = tokenizer.token_to_id(TURN_END)

    def ask(examples: Sequence[Example]) -> list[Answer]:
        prompts = [tokenizer.encode(prompt(example)).ids for example in examples]
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: dict[int, Answer] = {}
        for at in range(0, len(order), rows):
            chosen = order[at : at + rows]
            said = model.greedy([prompts[index] for index in chosen], end, max_tokens)
            for index, ids in zip(chosen, said, strict=True):
                answers[index] = parse(tokenizer.decode(ids, skip_special_tokens=False))
        return [answers[index] for index in range(len(prompts))]

    return ask


def over_http(url: str, model: str, at_once: int = 8, guided: bool = False) -> Ask:
    """As a client of the OpenAI API; with `guided` the schema of JSON questions is enforced."""
    import httpx

    client = httpx.Client(base_url=url, timeout=120)

    def one(example: Example) -> Answer:
        body: dict[str, Any] = {
            "model": model,
            "messages": messages(example.turns[:-1]),
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        if example.tools:
            body["tools"] = list(example.tools)
        if guided and example.schema is not None:
            body["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": example.schema},
            }
        reply = client.post("/chat/completions", json=body)
        reply.raise_for_status()
        return read(reply.json()["choices"][0]["message"])

    def ask(examples: Sequence[Example]) -> list[Answer]:
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(one, examples))

    return ask


def read(message: dict[str, Any]) -> Answer:
    calls = tuple(
        Call(call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    )
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    return Answer((message.get("content") or "").strip(), calls, thought.strip())


def _shown(content: str, calls: Sequence[Call]) -> str:
    return content + "".join(f" {call.name}({dict(call.arguments)})" for call in calls)
