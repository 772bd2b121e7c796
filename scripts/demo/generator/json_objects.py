"""JSON by schema: facts in a sentence, the object asked for by its schema."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from demo.generator.base import Example, Pool, Source, reply, user
from demo.generator.words import COLOURS, THINGS, city, name

ASK = Pool(
    (
        "{facts}\nWrite this as JSON of the schema {schema}", "{facts}\nJSON schema: {schema}",
        "Give me JSON for this schema: {schema}\n{facts}", "Schema: {schema}\nText: {facts}\nJSON:",
        "Fill in this JSON schema: {schema}\n{facts}",
        "{facts}\nAnswer with JSON only, by this schema: {schema}",
        "按照这个 schema 写 JSON:{schema}\n{facts}",
    ),
    (
        "{facts}\nGive me this as JSON of the schema {schema}",
        "Write JSON for this schema: {schema}\nText: {facts}",
        "Answer with JSON by this schema: {schema}\n{facts}",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Field:
    """A property, what it may be called, and how a sentence tells its value."""

    keys: tuple[str, ...]
    schema: dict[str, Any]
    sentences: tuple[str, ...]

    def value(self, source: Source) -> Any:
        kind = self.schema["type"]
        if "enum" in self.schema:
            return source.one_of(self.schema["enum"])
        if kind == "integer":
            return source.number(self.schema["minimum"], self.schema["maximum"])
        if kind == "boolean":
            return source.chance(0.5)
        return {"person": name, "city": city}[self.keys[0]](source)


PERSON = Field(
    ("person", "name", "first_name", "user"), {"type": "string"}, ("The name is {v}.", "This is about {v}.")
)
OTHERS = (
    Field(("city", "town", "home", "location"), {"type": "string"}, ("They live in {v}.", "Home is {v}.")),
    Field(
        ("age", "years", "age_in_years"),
        {"type": "integer", "minimum": 1, "maximum": 99},
        ("The age is {v}.", "They are {v} years old."),
    ),
    Field(
        ("colour", "color", "favourite"),
        {"type": "string", "enum": list(COLOURS)},
        ("The favourite colour is {v}.", "They like {v}."),
    ),
    Field(
        ("count", "quantity", "amount"),
        {"type": "integer", "minimum": 0, "maximum": 999},
        ("They have {v} {things}.", "There are {v} {things}."),
    ),
    Field(
        ("member", "active", "is_member"),
        {"type": "boolean"},
        ("They are a member.", "They belong to the club."),
    ),
)
NOT_MEMBER = "They are not a member."


def make(source: Source) -> Example:
    fields = [PERSON, *source.random.sample(OTHERS, source.number(0, 4))]
    facts, values, properties = [], {}, {}
    for item in fields:
        key, value = source.one_of(item.keys), item.value(source)
        facts.append(_sentence(source, item, value))
        # The sentence may tell more than is asked for.
        if item is PERSON or source.chance(0.85):
            values[key], properties[key] = value, _shown(source, item.schema)
    source.random.shuffle(facts)
    order = source.random.sample(list(values), len(values))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: properties[key] for key in order},
        "required": order,
    }
    if source.chance(0.3):
        schema["additionalProperties"] = False
    text = json.dumps({key: values[key] for key in order}, ensure_ascii=False)
    asked = source.pick(ASK).format(facts=" ".join(facts), schema=json.dumps(schema, ensure_ascii=False))
    return Example("json", (user(asked), reply(text)), schema=schema)


def _sentence(source: Source, item: Field, value: Any) -> str:
    if value is False:
        return NOT_MEMBER
    return source.one_of(item.sentences).format(v=value, things=source.pick(THINGS))


def _shown(source: Source, schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds are not always told."""
    if source.chance(0.5):
        return {key: value for key, value in schema.items() if key in ("type", "enum")}
    return schema
