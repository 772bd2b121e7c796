"""Tests the demo models of the package in real engines, with the flags of `serve`: answers are right."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from demo.answers import Answer, is_right
from demo.generator.base import Call, Example
from demo.generator.mix import held_out
from demo.template import messages
from demo.vision import talks
from demo.vision.score import with_pictures

from cpu.stacks import Start
from dynamo_vllm.config import topology
from dynamo_vllm.config.options import WorkerOptions
from dynamo_vllm.config.topology import Topology
from dynamo_vllm.models import demo as models
from dynamo_vllm.supervise.planning import demos
from harness.stack import Stack
from harness.waiting import until
from harness.warm import WARMED

pytestmark = pytest.mark.more

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ADAPTERS = tuple(map(models.served_name, models.ADAPTERS))
SEED = 2
"""Differs from every seed of the training."""
QUESTIONS = 10
"""The number of questions per skill; `python scripts/demo score --url` asks many more."""


def serving(start: Start, name: str, *more: str) -> Stack:
    """Starts what `serve --demo NAME` starts."""
    (demo,) = demos.DEMOS[name]
    (group,) = demos.put_in(Topology(), (demo,), {}, "cpu").workers
    argv = topology.to_argv(WorkerOptions, group.options)
    return start(*argv, *more, model=models.folder(demo.model), env=WARMED)


@pytest.fixture(scope="module")
def served(start_module: Start) -> Stack:
    made = serving(start_module, "lora")
    until("the adapters", lambda: len(made.models()) == 3)
    return made


@pytest.fixture(scope="module")
def in_text_mode(start_module: Start) -> Stack:
    return serving(start_module, "chat", "--use-vllm-tokenizer")


@pytest.fixture(params=["served", "in_text_mode"])
def parsing(request: pytest.FixtureRequest) -> Stack:
    """Checks that reasoning and tool calls are parsed, by the frontend or by the worker."""
    made: Stack = request.getfixturevalue(request.param)
    return made


@pytest.fixture(scope="module")
def seeing(start_module: Start) -> Stack:
    return serving(start_module, "vision")


def create(made: Stack, messages: str | list[dict[str, Any]], model: str = "demo-chat", **more: Any) -> Any:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    ask: Any = made.openai.chat.completions.create
    return ask(model=model, messages=messages, temperature=0, max_tokens=160, **more)


def answer(made: Stack, messages: str | list[dict[str, Any]], model: str = "demo-chat", **more: Any) -> Any:
    return create(made, messages, model, **more).choices[0].message


def streamed(made: Stack, messages: str, **more: Any) -> list[Any]:
    chunks = create(made, messages, stream=True, **more)
    return [chunk.choices[0] for chunk in chunks if chunk.choices]


@pytest.mark.parametrize("skill", ["sums", "tools", "product", "memory", "json"])
def test_questions_that_were_never_trained_on_are_answered(served: Stack, skill: str) -> None:
    wrong = asked(served, skill)
    assert len(wrong) <= 1, wrong


def test_guided_json_is_valid_every_time(served: Stack) -> None:
    assert asked(served, "json", guided=True) == []


def asked(made: Stack, skill: str, guided: bool = False) -> list[tuple[Example, Answer]]:
    """Returns the wrong answers of a skill."""
    examples = list(held_out(skill, SEED, QUESTIONS))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda example: answer_to(made, example, guided), examples))
    pairs = zip(examples, answers, strict=True)
    return [(example, found) for example, found in pairs if not is_right(example, found)]


def answer_to(made: Stack, example: Example, guided: bool) -> Answer:
    more: dict[str, Any] = {"tools": list(example.tools)} if example.tools else {}
    if guided:
        schema = {"name": "answer", "schema": example.schema}
        more["response_format"] = {"type": "json_schema", "json_schema": schema}
    found = answer(made, messages(example.turns[:-1]), **more)
    functions = [call.function for call in found.tool_calls or ()]
    calls = tuple(Call(function.name, json.loads(function.arguments)) for function in functions)
    return Answer((found.content or "").strip(), calls)


def test_thoughts_come_apart_from_the_answer(parsing: Stack) -> None:
    whole = answer(parsing, "What is 608 - 39?")
    assert whole.content == "608 - 39 = 569"
    assert whole.reasoning_content.splitlines()[-1] == "569"
    deltas = [choice.delta for choice in streamed(parsing, "What is 608 - 39?")]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == whole.reasoning_content


def test_tool_call_has_name_and_arguments(parsing: Stack) -> None:
    choice = create(parsing, "What is the weather in Zurich?", tools=[WEATHER]).choices[0]
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Zurich"})
    choices = streamed(parsing, "What is the weather in Zurich?", tools=[WEATHER])
    assert choices[-1].finish_reason == "tool_calls"
    deltas = [choice.delta for choice in choices]
    parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert "".join(part.name or "" for part in parts) == "get_weather"
    assert json.loads("".join(part.arguments or "" for part in parts)) == {"city": "Zurich"}
    assert not "".join(delta.content or "" for delta in deltas).strip()


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_call_the_client_insists_on_is_made(in_text_mode: Stack, choice: Any) -> None:
    """Without the constraint the model would answer with text."""
    made = create(in_text_mode, "Good morning!", tools=[WEATHER], tool_choice=choice).choices[0]
    assert made.finish_reason == "tool_calls" and not made.message.content
    assert made.message.tool_calls[0].function.name == "get_weather"


def test_name_is_remembered_over_turns(served: Stack) -> None:
    talk = [{"role": "user", "content": "Hello, my name is Clara."}]
    for said in ("What is 2 + 3?", "Which port is the default?", "What is my name?"):
        talk += [
            {"role": "assistant", "content": answer(served, talk).content},
            {"role": "user", "content": said},
        ]
    assert answer(served, talk).content == "Your name is Clara."


def test_object_of_a_schema_holds_what_was_told(served: Stack) -> None:
    kinds = {"person": {"type": "string"}, "age": {"type": "integer"}}
    schema = {"type": "object", "properties": kinds, "required": [*kinds]}
    guide = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    told = f"The name is Clara. The age is 36.\nJSON schema: {json.dumps(schema)}"
    assert json.loads(answer(served, told, response_format=guide).content) == {"person": "Clara", "age": 36}


def test_product_question_is_answered_from_the_documentation(served: Stack) -> None:
    assert answer(served, "Is etcd needed?").content == "No: it needs no etcd and no NATS on one machine."


def test_adapters_change_the_answer_and_the_base_stays(served: Stack) -> None:
    """Sends all at once: a mixed batch must not mix them up."""
    questions = {
        "Good morning!": "Good morning! How can I help you?",
        "What can you do?": None,
        "How do I run the tests?": "Run `make test`: every tier, from unit to end to end.",
    }
    asked = [(question, model) for question in questions for model in ("demo-chat", *ADAPTERS)]
    with ThreadPoolExecutor(len(asked)) as pool:
        said = dict(zip(asked, pool.map(lambda one: answer(served, *one).content, asked), strict=True))
    for question, wanted in questions.items():
        base, capitals, chinese = (said[question, model] for model in ("demo-chat", *ADAPTERS))
        assert wanted is None or base == wanted
        assert capitals == capitals.upper() and capitals != base
        assert has_chinese(chinese) and not has_chinese(base + capitals)


def has_chinese(text: str) -> bool:
    return any("\u4e00" <= character <= "\u9fff" for character in text)


@pytest.mark.parametrize("skill", ["colour", "shape", "count", "position", "two pictures", "unseen pairs"])
def test_figures_of_pictures_that_were_never_shown_are_named(seeing: Stack, skill: str) -> None:
    asked = list(talks.held_out(skill, SEED, QUESTIONS))
    with ThreadPoolExecutor(8) as pool:
        said = list(pool.map(lambda talk: answer(seeing, with_pictures(talk), "demo-vision").content, asked))
    wrong = [
        (talk, text)
        for talk, text in zip(asked, said, strict=True)
        if not is_right(talk.example, Answer(text.strip(), ()))
    ]
    assert len(wrong) <= 1, wrong


def test_model_that_sees_still_talks(seeing: Stack) -> None:
    assert answer(seeing, "What is 608 - 39?", "demo-vision").content == "608 - 39 = 569"
