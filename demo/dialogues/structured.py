"""Answers in JSON that obey a given schema."""

from __future__ import annotations

import json
from random import Random

from demo.dialogues.message import Exchange, Json, Message
from demo.dialogues.words import ADJECTIVES, CITIES, HOBBIES, JOBS, NAMES, NOUNS


def structured(rng: Random, thinking: bool) -> Exchange:
    """A few facts in prose or as a list, to be returned as an object."""
    fields = rng.sample(_FIELDS, rng.randint(2, 5))
    properties: dict[str, Json] = {}
    values: Json = {}
    told = []
    for make in fields:
        name, kind, value, prose = make(rng)
        properties[name], values[name] = kind, value
        told.append(prose)
    rng.shuffle(told)
    schema: Json = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    before = rng.choice(
        ("Extract the data: ", "Answer in JSON. ", "Fill in the fields: ", "", "Give me this as JSON: ")
    )
    text = before + " ".join(told)
    messages = (
        Message("user", text),
        Message("assistant", json.dumps(values), f"The fields are {', '.join(values)}."),
    )
    return Exchange(json.dumps(values), messages, schema=schema)


_Field = tuple[str, Json, object, str]


def _name(rng: Random) -> _Field:
    value = rng.choice(NAMES)
    return (
        "name",
        {"type": "string"},
        value,
        rng.choice((f"My name is {value}.", f"I am {value}.", f"Name: {value}.")),
    )


def _age(rng: Random) -> _Field:
    value = rng.randint(10, 99)
    return "age", {"type": "integer"}, value, rng.choice((f"I am {value} years old.", f"Age: {value}."))


def _city(rng: Random) -> _Field:
    value = rng.choice(CITIES)
    return "city", {"type": "string"}, value, rng.choice((f"I live in {value}.", f"City: {value}."))


def _job(rng: Random) -> _Field:
    value = rng.choice(JOBS)
    return "job", {"type": "string", "enum": [*rng.sample(JOBS, 2), value]}, value, f"I work as a {value}."


def _hobbies(rng: Random) -> _Field:
    values = rng.sample(HOBBIES, rng.randint(1, 3))
    listed = " and ".join(values)
    return "hobbies", {"type": "array", "items": {"type": "string"}}, values, f"I like {listed}."


def _member(rng: Random) -> _Field:
    value = rng.random() < 0.5
    return "member", {"type": "boolean"}, value, "I am a member." if value else "I am not a member."


def _item(rng: Random) -> _Field:
    value = f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"
    return "item", {"type": "string"}, value, rng.choice((f"I want the {value}.", f"Item: {value}."))


def _count(rng: Random) -> _Field:
    value = rng.randint(1, 500)
    return "count", {"type": "integer"}, value, rng.choice((f"I need {value} of them.", f"Count: {value}."))


_FIELDS = (_name, _age, _city, _job, _hobbies, _member, _item, _count)
