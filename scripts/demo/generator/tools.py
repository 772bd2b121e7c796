"""Tools as clients describe them: three families the model calls, under many names, and others beside."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from demo.generator.base import Call, Source
from demo.generator.words import made_up

Schema = dict[str, Any]


@dataclass(frozen=True)
class Tool:
    """One tool as it is offered in a request."""

    family: str
    name: str
    schema: Schema
    place_key: str = ""
    unit_key: str = ""
    days_key: str = ""
    expression_key: str = ""
    operand_keys: tuple[str, str, str] | None = None

    def call(self, arguments: Mapping[str, Any]) -> Call:
        return Call(self.name, dict(arguments))


def weather(source: Source) -> Tool:
    name = _name(
        source, ("get", "fetch", "current", "lookup", "show"), ("weather", "forecast", "weather_report")
    )
    place, place_schema = _place(source)
    properties, unit_key, days_key = {place: place_schema}, "", ""
    if source.chance(0.3):
        unit_key = source.one_of(("unit", "units", "scale"))
        properties[unit_key] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    if source.chance(0.25):
        days_key = source.one_of(("days", "num_days"))
        properties[days_key] = _described(source, {"type": "integer"}, "Number of days")
    text = source.one_of(
        (
            "Get the weather of a city",
            "Current weather in a place",
            "Tells the weather",
            "Weather forecast by city",
        )
    )
    schema = function(source, name, text, properties, [place])
    return Tool("weather", name, schema, place, unit_key, days_key)


def clock(source: Source) -> Tool:
    name = _name(source, ("get", "current", "local", "tell", "lookup"), ("time", "clock", "local_time"))
    place, place_schema = _place(source)
    text = source.one_of(
        ("Get the time in a city", "Current time in a place", "Tells the local time", "Time of day")
    )
    return Tool("time", name, function(source, name, text, {place: place_schema}, [place]), place)


def calculator(source: Source) -> Tool:
    name = _name(source, ("run", "do", "simple", "basic"), ("calculator", "calculate", "math", "compute"))
    text = source.one_of(
        ("Calculate an expression", "A calculator", "Does arithmetic", "Evaluate a sum or product")
    )
    if source.chance(0.3):
        first, second = source.one_of((("a", "b"), ("x", "y"), ("left", "right")))
        operation = source.one_of(("operation", "operator", "op"))
        properties: Schema = {
            first: {"type": "number"},
            second: {"type": "number"},
            operation: {"type": "string", "enum": ["add", "subtract", "multiply", "divide"]},
        }
        schema = function(source, name, text, properties, list(properties))
        return Tool("calculator", name, schema, operand_keys=(first, second, operation))
    key = source.one_of(("expression", "expr", "formula", "input"))
    properties = {key: _described(source, {"type": "string"}, "The expression")}
    return Tool("calculator", name, function(source, name, text, properties, [key]), expression_key=key)


FAMILIES: dict[str, Callable[[Source], Tool]] = {"weather": weather, "time": clock, "calculator": calculator}
OTHERS: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("send_email", "Send an email", {"to": "string", "subject": "string", "body": "string"}),
    ("search_web", "Search the web", {"query": "string"}),
    ("play_music", "Play a song", {"title": "string", "artist": "string"}),
    ("translate", "Translate text", {"text": "string", "language": "string"}),
    ("set_alarm", "Set an alarm", {"at": "string"}),
    ("stock_price", "Price of a share", {"symbol": "string"}),
    ("create_event", "Put an event into the calendar", {"title": "string", "day": "string"}),
    ("read_file", "Read a file", {"path": "string"}),
    ("turn_on_light", "Switch a light", {"room": "string", "level": "integer"}),
    ("order_food", "Order something to eat", {"dish": "string", "count": "integer"}),
)


def other(source: Source) -> Tool:
    """A tool that nothing asked here needs."""
    name, text, types = source.one_of(OTHERS)
    if source.chance(0.3):
        name = f"{made_up(source)}_{name}"
    properties = {key: {"type": kind} for key, kind in types.items()}
    return Tool("other", name, function(source, name, text, properties, list(properties)[:1]))


def function(source: Source, name: str, text: str, properties: Schema, required: list[str]) -> Schema:
    described: Schema = {"name": name}
    if source.chance(0.9):
        described["description"] = text + source.one_of(("", "."))
    described["parameters"] = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": described}


def _name(source: Source, verbs: tuple[str, ...], nouns: tuple[str, ...]) -> str:
    """Alone, with a verb, or in a namespace nobody knows: names are to be read, not known."""
    noun = source.one_of(nouns)
    if source.chance(0.2):
        return f"{made_up(source)}_{noun}"
    return noun if source.chance(0.25) else f"{source.one_of(verbs)}_{noun}"


def _place(source: Source) -> tuple[str, Schema]:
    key = source.one_of(("city", "city", "location", "place", "town", "where"))
    text = source.one_of(("The city", "Name of the city", "City name, e.g. Paris", "Where"))
    return key, _described(source, {"type": "string"}, text)


def _described(source: Source, schema: Schema, text: str) -> Schema:
    return {**schema, "description": text} if source.chance(0.5) else schema
