"""Tests the training data of the demo models: repeatable, correct, and without the held-out set."""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from demo import generator, score
from demo.answers import Answer, fits, is_right, parse
from demo.generator import facts, mix, product, sums, tool_calls, words
from demo.generator.base import (
    Call,
    Example,
    Pool,
    Source,
    all_ways,
    calling,
    is_held_out,
    reply,
    user,
)
from demo.generator.styles import STYLES
from demo.template import prompt, render

ROOT = Path(__file__).parents[3]
TRAINED = 800
SKILLS = tuple(mix.HELD_OUT)


@cache
def trained() -> tuple[Example, ...]:
    return tuple(mix.train_example(1, index) for index in range(TRAINED))


@cache
def held_out(skill: str) -> tuple[Example, ...]:
    return tuple(mix.held_out(skill, 2, 60))


def everything() -> list[Example]:
    return [*trained(), *(example for skill in SKILLS for example in held_out(skill))]


def source(split: str = "train", seed: int = 1) -> Source:
    return Source(split, random.Random(seed))  # type: ignore[arg-type]


def test_wording_with_alternatives_stands_for_each() -> None:
    wording = "(Could|Would) you( please|) add {a}?"
    ways = all_ways(wording)
    assert ways == [
        "Could you please add {a}?",
        "Could you add {a}?",
        "Would you please add {a}?",
        "Would you add {a}?",
    ]
    one = source()
    assert {one.pick(Pool((wording,), ("x",))) for _ in range(60)} == set(ways)
    assert all_ways("({a} + {b}) * 2") == ["({a} + {b}) * 2"]


def test_training_has_every_skill_and_is_repeatable() -> None:
    assert {example.skill for example in trained()} >= set(SKILLS)
    assert [mix.train_example(1, index) for index in range(100)] == list(trained()[:100])
    assert [mix.train_example(2, index) for index in range(100)] != list(trained()[:100])
    assert tuple(mix.held_out("tools", 2, 60)) == held_out("tools")


def test_no_wording_is_in_both_splits() -> None:
    pools = 0
    for module in pkgutil.iter_modules(generator.__path__):
        for value in vars(importlib.import_module(f"demo.generator.{module.name}")).values():
            if isinstance(value, Pool):
                pools += 1
                ways = {way.lower() for wording in value.train for way in all_ways(wording)}
                assert value.train and value.held_out
                assert not ways & {way.lower() for wording in value.held_out for way in all_ways(wording)}
                assert all(text.strip() for text in (*value.train, *value.held_out))
    assert pools >= 18


def test_no_held_out_question_is_trained_on() -> None:
    asked = {turn.content.lower() for example in trained() for turn in example.turns if turn.role == "user"}
    for skill in ("sums", "tools", "product", "json", "counting", "refusals"):
        assert not {example.turns[-2].content.lower() for example in held_out(skill)} & asked, skill


def test_held_out_cities_and_names_are_in_no_training_text() -> None:
    text = "\n".join(render(example) for example in trained())
    found = [word for word in (*words.CITIES.held_out, *words.NAMES.held_out) if word in text]
    assert not found


def test_held_out_product_questions_are_not_made_by_varying_trained_ones() -> None:
    asked = {question for known in facts.FACTS for question in known.wordings.held_out}
    one = source()
    for known in facts.FACTS:
        for question in known.wordings.train:
            assert not asked & {product._varied(one, question) for _ in range(60)}


def test_made_up_words_and_pairs_of_numbers_belong_to_one_split() -> None:
    for split in ("train", "held-out"):
        one = source(split)
        assert {is_held_out(words.made_up(one)) for _ in range(500)} == {split == "held-out"}
        for a, b in (sums.pair(one) for _ in range(300)):  # whichever way round
            assert is_held_out(f"{min(a, b)} {max(a, b)}") == (split == "held-out")


def test_every_step_of_every_trace_is_right() -> None:
    one = source()
    for a, b, adds in ((0, 0, True), (999, 999, True), (999, 1, True), (7, 85, False), (999, 0, False)):
        check_trace(sums.trace(a, b, adds), a, b, adds)
    for _ in range(500):
        (a, b), adds = sums.pair(one), one.chance(0.5)
        check_trace(sums.trace(a, b, adds), a, b, adds)


def check_trace(trace: str, a: int, b: int, adds: bool) -> None:
    """Checks the columns from the right, each with the carry of the one before, as a person would."""
    first, *rest = trace.split("\n")
    assert re.fullmatch(r"\d{3}[+-]\d{3}", first)
    assert (int(first[:3]), int(first[4:])) == (a, b)
    if not adds and a < b:
        assert rest.pop(0) == f"-({b:03}-{a:03})"
    *columns, result = rest
    assert int(result) == (a + b if adds else a - b)
    over = 0
    for place, column in enumerate(columns):
        x, y, z, given = re.fullmatch(r"(\d)[+-](\d)[+-](\d)=(.*)", column).groups()  # type: ignore[union-attr]
        assert int(z) == over
        assert (int(x), int(y)) == tuple(
            value // 10**place % 10 for value in ((a, b) if adds else (max(a, b), min(a, b)))
        )
        if adds:
            assert int(given) == int(x) + int(y) + over
            over = int(given) // 10
        else:
            digit, taken = map(int, given.split())
            assert digit - 10 * taken == int(x) - int(y) - over
            over = taken


def test_every_conversation_takes_turns_and_ends_with_an_answer() -> None:
    for example in everything():
        roles = [turn.role for turn in example.turns]
        assert roles[-1] == "assistant"
        assert all(one != other for one, other in pairwise(roles))
        assert example.answer.content or example.answer.calls


def test_every_answer_reads_back_from_the_rendered_text() -> None:
    for example in everything():
        text = render(example)
        shown = prompt(example)
        if example.answer.thought is not None:
            assert text.startswith(shown)
        else:
            assert text.startswith(prompt(example, thinking=False))
        answer = parse(text[len(shown) :].removesuffix("<|im_end|>\n"))
        assert answer.content == example.answer.content
        assert answer.thought == (example.answer.thought or "")
        assert is_right(example, answer), example


def test_every_call_is_of_an_offered_tool_with_arguments_of_its_schema() -> None:
    calls = 0
    for example in everything():
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in example.tools}
        assert len(offered) == len(example.tools)
        for call in (call for turn in example.turns for call in turn.calls):
            calls += 1
            schema = offered[call.name]
            assert set(schema["required"]) <= set(call.arguments) <= set(schema["properties"])
            for key, value in call.arguments.items():
                assert value in schema["properties"][key].get("enum", [value])
                types = {"string": str, "integer": int, "number": int}
                assert isinstance(value, types[schema["properties"][key]["type"]])
    assert calls > 100


def test_what_is_called_with_was_asked_for() -> None:
    one = source("held-out")
    for _ in range(200):
        asked = tool_calls.ask(one)
        if asked.place:
            assert asked.place in asked.text
        else:
            assert all(number in asked.text for number in re.findall(r"\d+", asked.expression))


def test_json_answers_fit_their_schema_and_hold_what_was_said() -> None:
    for example in held_out("json"):
        assert example.schema is not None and fits(example.answer.content, example.schema)
        for value in json.loads(example.answer.content).values():
            assert isinstance(value, bool) or str(value) in example.turns[-2].content


def test_json_that_breaks_the_schema_is_wrong() -> None:
    properties = {
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "name": {"type": "string"},
        "like": {"type": "string", "enum": ["red"]},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    right = {"age": 3, "name": "A", "like": "red"}
    assert fits(json.dumps(right), schema)
    for wrong in ({"age": "3"}, {"age": 300}, {"age": True}, {"like": "pink"}, {"more": 1}):
        assert not fits(json.dumps(right | wrong), schema)
    for text in ("", "{}", f"{json.dumps(right)} so"):
        assert not fits(text, schema)


def test_answers_that_are_nearly_right_are_wrong() -> None:
    called = Example("tools", (user("?"), calling(Call("a", {"b": 1}))))
    assert is_right(called, Answer("", (Call("a", {"b": 1}),)))
    for calls in ((), (Call("a", {"b": 2}),), (Call("c", {"b": 1}),), (Call("a", {"b": 1}),) * 2):
        assert not is_right(called, Answer("", calls))
    said = Example("sums", (user("?"), reply("1 + 1 = 2")))
    assert is_right(said, Answer("1 + 1 = 2"))
    assert not is_right(said, Answer("1 + 1 = 3"))
    assert not is_right(said, Answer("1 + 1 = 2", (Call("a", {}),)))
    assert parse('<think></think><tool_call>\n{"name": broken\n</tool_call>').calls[0].name.startswith("not")


def test_what_the_model_says_of_the_product_stands_in_its_documentation() -> None:
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
    )
    for known in facts.FACTS:
        assert _flat(known.words) in _flat((ROOT / known.page).read_text(encoding="utf-8"))
        for answer in (known.answer, known.chinese):
            for flag in re.findall(r"--[a-z-]+|DYN_[A-Z_]+|make [a-z]+\b(?=`)", answer):
                assert flag in pages, f"no page knows {flag}"
            for command in re.findall(r"`dynamo-vllm ([a-z-]+)", answer):
                assert f"dynamo-vllm {command}" in pages or f"`{command}" in pages
            assert answer.count("`") % 2 == 0


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_capitals_change_answers_and_nothing_else() -> None:
    style = STYLES["capitals"]
    for skill in style.skills:
        changed = (plain for plain in held_out(skill) if plain.answer.content.upper() != plain.answer.content)
        for plain, loud in zip(changed, style.held_out(skill, 2, 20), strict=False):
            assert plain.turns[0] == loud.turns[0]
            assert loud.answer.content == plain.answer.content.upper()


@pytest.mark.parametrize("name", STYLES)
def test_answers_are_in_their_style_and_those_of_the_base_in_none(name: str) -> None:
    style = STYLES[name]
    asked = [example for skill in style.skills for example in style.held_out(skill, 2, 20)]
    assert all(style.is_in(example.answer.content) for example in asked)
    assert not any(map(style.is_in, ("I count: 1, 2, 3.", "Hello Selma!", "")))
    for index in range(40):
        turns = style.train_example(1, index).turns
        said = [turn.content for turn in turns if turn.role == "assistant" and turn.content]
        assert all(words.is_chinese(text) if name == "chinese" else text == text.upper() for text in said)


def test_style_of_wrong_answers_counts_and_that_of_others_does_not() -> None:
    answers = iter([Answer("NO."), Answer("NO."), Answer("No."), Answer("NO.")])
    effect, *skills = score.score_style(
        lambda asked: [next(answers) for _ in asked], STYLES["capitals"], 2, ("memory", "product")
    )
    assert (effect.skill, effect.right, effect.count, effect.is_enough) == (score.EFFECT, 3, 4, False)
    assert [(one.skill, one.right, one.is_enough) for one in skills] == [
        ("memory", 0, True),
        ("product", 0, True),
    ]
