"""Calling a tool that is offered, and answering from its result."""

from __future__ import annotations

import json
from random import Random

from demo.dialogues.message import Call, Exchange, Json, Message
from demo.dialogues.words import ADJECTIVES, CITIES, NAMES, NOUNS, digits

_ACTIONS = (
    "create",
    "delete",
    "find",
    "move",
    "open",
    "read",
    "rename",
    "save",
    "send",
    "start",
    "stop",
    "update",
)
_OBJECTS = (
    "account",
    "calendar",
    "event",
    "file",
    "image",
    "list",
    "message",
    "note",
    "order",
    "record",
    "task",
    "ticket",
)
_STRINGS = ("title", "owner", "path", "label", "city", "text", "topic", "color")
_NUMBERS = ("count", "priority", "limit", "size", "level", "hours")
_FLAGS = ("urgent", "public", "force")


def tool_call(rng: Random, thinking: bool) -> Exchange:
    """One call with all its arguments, its result, and the answer."""
    return rng.choice((_weather, _listing, _sum, _general, _general, _general))(rng)


def tool(name: str, description: str, properties: dict[str, Json]) -> Json:
    """A function object in which every parameter is required."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": name, "description": description, "parameters": parameters}


def other_tool(rng: Random) -> Json:
    """A tool that is offered beside the one that is needed."""
    return _general_tool(rng)[0]


def _weather(rng: Random) -> Exchange:
    city, degrees = rng.choice(CITIES), rng.randint(-9, 39)
    sky = rng.choice(("sunny", "cloudy", "rainy", "windy"))
    offered = tool("get_weather", "Get the weather in a city.", {"city": {"type": "string"}})
    question = rng.choice(
        ("What is the weather in {}?", "How warm is it in {}?", "Tell me the weather in {}.")
    ).format(city)
    result = json.dumps({"temperature": degrees, "sky": sky})
    answer = f"It is {sky} in {city} with {degrees} degrees."
    return _exchange(question, offered, {"city": city}, result, answer)


def _listing(rng: Random) -> Exchange:
    names = [f"{rng.choice(NOUNS)}.txt" for _ in range(rng.randint(1, 4))]
    path = rng.choice((".", "/tmp", f"/home/{rng.choice(NAMES).lower()}", f"./{rng.choice(NOUNS)}"))
    offered = tool(
        "list_files",
        "List files in a directory.",
        {"path": {"type": "string", "description": "Directory path to list."}},
    )
    where = "the current directory" if path == "." else path
    question = rng.choice(("List the files in {}.", "Which files are in {}?", "Show me {}.")).format(where)
    return _exchange(
        question, offered, {"path": path}, "\n".join(names), f"The files are: {', '.join(names)}"
    )


def _sum(rng: Random) -> Exchange:
    a, b = int(digits(rng, rng.randint(2, 6))), int(digits(rng, rng.randint(2, 6)))
    number: Json = {"type": "integer"}
    offered = tool("add", "Add two numbers.", {"a": number, "b": number})
    question = rng.choice(("Use the tool to add {} and {}.", "What is {} + {}? Use the tool.")).format(a, b)
    return _exchange(question, offered, {"a": a, "b": b}, str(a + b), f"The sum is {a + b}.")


def _general(rng: Random) -> Exchange:
    """A made-up tool whose arguments are all in the question."""
    offered, arguments = _general_tool(rng)
    action, thing = offered["name"].split("_")
    parts = [f"{key} {json.dumps(value)}" for key, value in arguments.items()]
    rng.shuffle(parts)
    listed = parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
    form = rng.choice(
        (
            "Please {} the {} with {}.",
            "{} a {} with {}.",
            "I want to {} one {}: {}.",
            "Use a tool to {} the {} with {}.",
        )
    )
    question = form.format(action, thing, listed)
    number = digits(rng, 4)
    if rng.random() < 0.8:
        result, answer = json.dumps({"ok": True, "id": int(number)}), f"Done. The id is {number}."
    else:
        result = json.dumps({"ok": False, "error": "not found"})
        answer = "It failed: not found."
    return _exchange(question[0].upper() + question[1:], offered, arguments, result, answer)


def _general_tool(rng: Random) -> tuple[Json, Json]:
    properties: dict[str, Json] = {}
    arguments: Json = {}
    for name in rng.sample(_STRINGS, rng.randint(1, 2)):
        properties[name] = {"type": "string"}
        arguments[name] = rng.choice(
            (rng.choice(NOUNS), f"{rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", rng.choice(NAMES))
        )
    if rng.random() < 0.6:
        name = rng.choice(_NUMBERS)
        properties[name], arguments[name] = {"type": "integer"}, rng.randint(1, 999)
    if rng.random() < 0.3:
        name = rng.choice(_FLAGS)
        properties[name], arguments[name] = {"type": "boolean"}, rng.random() < 0.5
    action, thing = rng.choice(_ACTIONS), rng.choice(_OBJECTS)
    return tool(f"{action}_{thing}", f"{action.capitalize()} a {thing}.", properties), arguments


def _exchange(question: str, offered: Json, arguments: Json, result: str, answer: str) -> Exchange:
    call = Call(offered["name"], arguments)
    return Exchange(
        json.dumps([call.name, arguments]),
        (
            Message("user", question),
            Message("assistant", "", f"I need the tool {call.name}.", (call,)),
            Message("tool", result),
            Message("assistant", answer, "I have the result."),
        ),
        tools=(offered,),
    )
