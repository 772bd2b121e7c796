"""Tool calls, what to make of their results, and when to call none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from demo.generator import counting, greetings, product, sums, tools
from demo.generator.base import Call, Example, Pool, Source, Turn, calling, reply, user
from demo.generator.tools import Tool
from demo.generator.words import city, loosely

WEATHER = Pool(
    (
        "What is the weather in {city}?", "How is the weather in {city}?", "Weather in {city}?",
        "weather {city}",
        "Tell me the weather in {city}.", "Is it raining in {city}?", "Is it cold in {city} today?",
        "Will it rain in {city}?", "What is the weather like in {city}?",
        "Show me the forecast for {city}.",
        "Do I need an umbrella in {city}?", "How warm is it in {city}?",
        "I am going to {city}. How is the weather?",
        "Please check the weather in {city}.", "What is the temperature in {city}?",
        "Forecast for {city} please",
        "Give me the weather of {city} now.",
        "How does the weather in {city} look( today| now| right now| at the moment|)?",
        "What is it like in {city}( now| today| this morning| right now|)?",
        ("Is it (sunny|windy|foggy|snowing|hot|nice) in {city} (now|right now|at the moment|this week|"
        "or not)?"),
        "Is the weather in {city} (good|bad|fine|nice) (now|today|tonight|tomorrow)?",
        "What will the weather in {city} be( like|) (tomorrow|tonight|this week)?",
        ("(I live in|I stay in|We are in|My sister is in|I was in) {city}. (Is it cold|Is it hot|"
        "Will it rain|Is it windy|How is the weather)( there| now|)?"),
        ("(I fly to|We go to|I am travelling to|I am leaving for) {city} (today|tomorrow|soon). "
        "(Do I need a coat|Do we need an umbrella|What is the weather there|Will it be warm)?"),
        ("(Could|Would|Will) you (look up|show me|tell me) the (weather|forecast|temperature) (in|for|"
        "of) {city}?"),
        "{city}: what is the weather( there|)?",
        "How (hot|wet|windy) is it in {city} (now|today|there|outside)?",
        "{city}现在(热|下雪|有风)吗?", "我在{city},(今天冷吗|现在下雨吗|天气好吗)?", "{city}的天气(好|坏)吗?",
        "{city}天气怎么样?", "{city}今天下雨吗?",
        "查一下{city}的天气。",
        "今天{city}多少度?", "现在{city}冷吗?", "请问{city}冷不冷?", "明天{city}会下雨吗?",
        "帮我看看{city}的天气。",
    ),
    (
        "Can you check the weather in {city}?", "How cold is it in {city}?", "Is it warm in {city} today?",
        "I am in {city}. Do I need an umbrella?", "Tell me the forecast for {city} please.",
        "What is the weather in {city} like now?", "{city}今天天气怎么样?", "请查一下{city}的天气。",
        "Could you tell me if it rains in {city}?", "My friend lives in {city}. Is it warm there?",
        "What is the temperature in {city} right now?",
    ),
)  # fmt: skip
TIME = Pool(
    (
        "What time is it in {city}?", "Time in {city}?", "Tell me the time in {city}.",
        "What is the time in {city}?",
        "How late is it in {city}?", "What is the local time in {city}?",
        "Give me the current time in {city}.",
        "I want to call someone in {city}. What time is it there?", "time {city}",
        "Which time do they have in {city}?",
        "Please tell me how late it is in {city}.",
        "What is the (hour|clock time|time) in {city} (now|right now|at the moment|please)?",
        ("(I live in|We are in|My sister is in|I fly to|I stay in) {city}. (What is the time|"
        "How late is it|What time is it now)( there|)?"),
        "(Could|Would|Will) you (look up|show me|say|check) the (time|local time) (in|for|of) {city}?",
        "{city}: what time is it( there|)?",
        "Is it (late|early|morning|evening|night) in {city} (now|already|or not)?",
        "我在{city},(现在几点|几点了)?", "{city}现在(几点钟|是早上还是晚上)?",
        "{city}现在几点?", "{city}现在是什么时间?",
        "告诉我{city}的时间。", "{city}几点了?", "请问{city}现在几点?", "请问现在{city}是几点钟?",
        "帮我看看{city}几点了。",
        "现在{city}是白天吗?", "今天{city}几点天黑?",
    ),
    (
        "Can you tell me the time in {city}?", "What is the current time in {city}?",
        "How late is it now in {city}?",
        "I am going to {city}. What time is it there?", "请告诉我{city}的时间。", "现在{city}几点?",
        "We are going to {city}. How late is it there?", "Could you tell me what time it is in {city}?",
    ),
)  # fmt: skip
CALCULATE = Pool(
    (
        "What is {e}?", "Calculate {e}.", "{e}", "{e} = ?", "How much is {e}?", "Compute {e}.",
        "Please calculate {e}.",
        "Work out {e} for me.", "I need the result of {e}.",
        "(Could|Would|Will) you (compute|work out|solve) {e}?", "(Give|Show|Tell) me {e}.",
        "What does {e} (make|give|come to)?",
        "I want to know (how much|what) {e} is.",
        "计算 {e}。",
        "{e} 等于多少?",
    ),
    ("Can you calculate {e}?", "Please work out {e}.", "Tell me the result of {e}.", "请计算 {e}。"),
)  # fmt: skip
IN_UNIT = {
    "celsius": (" in celsius", " in degrees celsius"),
    "fahrenheit": (" in fahrenheit", " in degrees fahrenheit"),
}
FOR_DAYS = (" for the next {n} days", " for {n} days")
CONDITIONS = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy")
CONDITIONS_ZH = dict(zip(CONDITIONS, ("晴", "多云", "下雨", "有风", "下雪", "有雾"), strict=True))
FAILURES = ("not found", "service unavailable", "timed out", "no data")
NO_TOOL = "None of my tools can do that."
NO_TOOL_ZH = "我的工具都做不到这个。"
OPERATIONS = {"+": "add", "-": "subtract", "*": "multiply", "/": "divide"}
SPOKEN = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}


@dataclass(frozen=True)
class Asked:
    """What the user wants of one tool, and the call that does it."""

    text: str
    tool: Tool
    arguments: Mapping[str, Any]
    place: str = ""
    expression: str = ""

    @property
    def call(self) -> Call:
        return self.tool.call(self.arguments)


def make(source: Source) -> Example:
    if source.split == "held-out":
        return call(source)
    return source.one_of(
        (call, call, call, call, two_calls, result, result, next_call, no_fit, beside_tools)
    )(source)


def call(source: Source) -> Example:
    asked = ask(source)
    turns = (user(asked.text), calling(asked.call))
    return Example("tools", turns, offered(source, asked.tool))


def two_calls(source: Source) -> Example:
    tool = source.one_of((tools.weather, tools.clock))(source)
    first, second = city(source), city(source)
    asked = source.pick(WEATHER if tool.family == "weather" else TIME).format(city=f"{first} and {second}")
    calls = (tool.call({tool.place_key: first}), tool.call({tool.place_key: second}))
    return Example("tools", (user(asked), calling(*calls)), offered(source, tool))


def result(source: Source) -> Example:
    """The tool has answered; say it."""
    asked = ask(source)
    turns = (user(asked.text), calling(asked.call), *told(source, asked))
    return Example("tool results", turns, offered(source, asked.tool))


def next_call(source: Source) -> Example:
    """The same tool once more, for something else."""
    first = ask(source)
    second = ask(source, first.tool)
    turns = (
        user(first.text),
        calling(first.call),
        *told(source, first),
        user(second.text),
        calling(second.call),
    )
    return Example("tools", turns, offered(source, first.tool))


def no_fit(source: Source) -> Example:
    """Something a tool could do, but not one of these."""
    asked = ask(source)
    while asked.tool.family == "calculator":
        asked = ask(source)
    families = [family for family in tools.FAMILIES if family != asked.tool.family]
    given = [tools.other(source)]
    if source.chance(0.6):
        given.append(tools.FAMILIES[source.one_of(families)](source))
    turns = (user(asked.text), reply(NO_TOOL, chinese=NO_TOOL_ZH))
    return Example("no tool", turns, _shuffled(source, given))


def beside_tools(source: Source) -> Example:
    """A question that needs none of the tools that are there; a sum is one only without a calculator."""
    make_other = source.one_of((greetings.make, product.make, counting.make, sums.make))
    example: Example = make_other(source)
    families = ["weather", "time"] if example.skill == "sums" else list(tools.FAMILIES)
    tool = tools.FAMILIES[source.one_of(families)](source)
    others = [tools.other(source) for _ in range(source.number(0, 2))]
    return replace(example, tools=_shuffled(source, [tool, *others]))


def offered(source: Source, tool: Tool) -> tuple[Mapping[str, Any], ...]:
    """The tool among others, of other families."""
    given = [tool]
    for family, build in tools.FAMILIES.items():
        if family != tool.family and source.chance(0.35):
            given.append(build(source))
    given += [tools.other(source) for _ in range(source.one_of((0, 0, 1, 1, 2)))]
    return _shuffled(source, given)


def _shuffled(source: Source, given: list[Tool]) -> tuple[Mapping[str, Any], ...]:
    """In any order; of two with one name, the first given."""
    distinct = list({tool.name: tool for tool in reversed(given)}.values())
    source.random.shuffle(distinct)
    return tuple(tool.schema for tool in distinct)


def ask(source: Source, tool: Tool | None = None) -> Asked:
    tool = tool or source.one_of((tools.weather, tools.weather, tools.clock, tools.calculator))(source)
    return _sum(source, tool) if tool.family == "calculator" else _place(source, tool)


def _place(source: Source, tool: Tool) -> Asked:
    place = city(source)
    text = source.pick(WEATHER if tool.family == "weather" else TIME).format(city=place)
    arguments: dict[str, Any] = {tool.place_key: place}
    text = loosely(source, text) if not text.startswith(place) else text
    # Wishes go to the end of the sentence; where the tool has no such argument they are left out of the call.
    if tool.family == "weather" and source.chance(0.2):
        unit = source.one_of(tuple(IN_UNIT))
        text = _append(text, source.one_of(IN_UNIT[unit]))
        if tool.unit_key:
            arguments[tool.unit_key] = unit
    elif tool.family == "weather" and source.chance(0.15):
        days = source.number(2, 9)
        text = _append(text, source.one_of(FOR_DAYS).format(n=days))
        if tool.days_key:
            arguments[tool.days_key] = days
    return Asked(text, tool, arguments, place=place)


def _append(text: str, words: str) -> str:
    end = text[-1] if text[-1] in "?.。?" else ""
    return text[: len(text) - len(end)] + words + end


def _sum(source: Source, tool: Tool) -> Asked:
    operator = source.one_of("+-**/")
    while True:
        a, b = (source.number(1, 10 ** source.number(1, 4) - 1) for _ in range(2))
        if source.owns(f"{a} {operator} {b}"):
            break
    expression = f"{a} {operator} {b}"
    said = expression if source.chance(0.5) else f"{a} {SPOKEN[operator]} {b}"
    if tool.operand_keys:
        first, second, operation = tool.operand_keys
        arguments: dict[str, Any] = {first: a, second: b, operation: OPERATIONS[operator]}
    else:
        if source.chance(0.25):
            c = source.number(2, 99)
            expression = said = f"({a} {operator} {b}) * {c}" if source.chance(0.5) else f"{expression} + {c}"
        arguments = {tool.expression_key: expression}
    return Asked(
        loosely(source, source.pick(CALCULATE).format(e=said)), tool, arguments, expression=expression
    )


def told(source: Source, asked: Asked) -> tuple[Turn, Turn]:
    """A result, and the sentence that tells it."""
    if source.chance(0.1):
        failure = source.one_of(FAILURES)
        return _tool({"error": failure}), reply(
            f"The tool failed: {failure}.", chinese=f"工具出错了:{failure}。"
        )
    if asked.tool.family == "weather":
        return _weather_told(source, asked.place)
    if asked.tool.family == "time":
        time = f"{source.number(0, 23):02}:{source.number(0, 59):02}"
        raw = source.one_of(({"time": time}, {"city": asked.place, "time": time}, time))
        return _tool(raw), reply(f"It is {time} in {asked.place}.", chinese=f"{asked.place}现在是 {time}。")
    value = source.number(-999, 99999)
    raw = source.one_of(({"result": value}, {"value": value}, str(value)))
    return _tool(raw), reply(f"The result is {value}.", chinese=f"结果是 {value}。")


def _weather_told(source: Source, place: str) -> tuple[Turn, Turn]:
    degrees, condition = source.number(-20, 40), source.one_of(CONDITIONS)
    fields: dict[str, Any] = {
        source.one_of(("temperature", "temp", "degrees")): degrees,
        source.one_of(("condition", "sky", "weather")): condition,
    }
    if source.chance(0.4):
        fields = {"city": place, **fields}
    raw: Any = fields if source.chance(0.8) else f"{degrees} degrees, {condition}"
    return _tool(raw), reply(
        f"In {place} it is {degrees} degrees and {condition}.",
        chinese=f"{place}现在 {degrees} 度,{CONDITIONS_ZH[condition]}。",
    )


def _tool(raw: Any) -> Turn:
    return Turn("tool", raw if isinstance(raw, str) else json.dumps(raw, ensure_ascii=False))
