"""Facts stated in the conversation and asked for later, nearby or thousands of tokens on."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from demo.dialogues.message import Exchange, Message
from demo.dialogues.words import ADJECTIVES, CITIES, HOBBIES, JOBS, NAMES, NOUNS, digits, sentence

_ASK = ("What is {}?", "Tell me {}.", "Do you remember {}?", "Please tell me {}.", "What was {}?")
_ACKNOWLEDGE = ("I will remember that.",)


@dataclass(frozen=True)
class Fact:
    """``subject`` has ``value``."""

    subject: str
    value: str

    def told(self) -> str:
        """As a sentence, beginning in upper case."""
        return f"{self.subject[0].upper()}{self.subject[1:]} is {self.value}."


def fact(rng: Random) -> Fact:
    """A fact whose subject has many alternatives."""
    form = rng.randrange(5)
    if form <= 1:
        return Fact(f"the code of the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}", digits(rng, 4))
    if form == 2:
        return Fact(f"the password of {rng.choice(NAMES)}", rng.choice(NOUNS))
    if form == 3:
        return Fact(f"the city of {rng.choice(NAMES)} the {rng.choice(JOBS)}", rng.choice(CITIES))
    return Fact(f"the number of the {rng.choice(NOUNS)} in {rng.choice(CITIES)}", digits(rng, 3))


def facts(rng: Random, count: int) -> list[Fact]:
    """Facts with different subjects."""
    found: dict[str, Fact] = {}
    while len(found) < count:
        drawn = fact(rng)
        found.setdefault(drawn.subject, drawn)
    return list(found.values())


def notes(rng: Random, told: list[Fact], sentences: int) -> str:
    """A text of ``sentences`` fillers with the facts at random places."""
    lines = [sentence(rng) for _ in range(sentences)]
    for item in told:
        lines.insert(rng.randint(0, len(lines)), item.told())
    return " ".join(lines)


def needle(rng: Random, thinking: bool) -> Exchange:
    """Notes of a few hundred tokens and one question."""
    told = facts(rng, rng.randint(1, 6))
    return needle_in(rng, told, rng.choice(told), rng.randint(3, 40))


def needle_in(rng: Random, told: list[Fact], asked: Fact, sentences: int) -> Exchange:
    """A question about notes of ``sentences`` fillers."""
    text = notes(rng, told, sentences)
    return Exchange(
        asked.told(),
        (Message("user", f"Read these notes. {text} {_question(rng, asked)}"), _answer(asked)),
    )


def far_needle(rng: Random, sentences: int) -> Exchange:
    """One fact at the beginning, then ``sentences`` fillers with other facts, then the question for it."""
    asked, *others = facts(rng, 1 + rng.randint(0, 4))
    text = f"{asked.told()} {notes(rng, others, sentences)}"
    return Exchange(
        asked.told(), (Message("user", f"Read these notes. {text} {_question(rng, asked)}"), _answer(asked))
    )


def interview(rng: Random, sentences: int, questions: int) -> list[Exchange]:
    """Long notes, read in one turn, then asked about in ``questions`` more."""
    told = facts(rng, questions + rng.randint(0, questions))
    opening = Exchange(
        "notes",
        (
            Message("user", f"Read these notes. {notes(rng, told, sentences)}"),
            Message("assistant", "I have read them.", "I am asked to read."),
        ),
    )
    return [opening, *(ask(rng, item) for item in rng.sample(told, questions))]


def tell(rng: Random, item: Fact) -> Exchange:
    """The user states a fact."""
    before = rng.choice(("Remember this: ", "Note: ", "Remember: ", ""))
    return Exchange(
        item.told(),
        (
            Message("user", before + item.told()),
            Message("assistant", rng.choice(_ACKNOWLEDGE), "A fact to remember."),
        ),
    )


def ask(rng: Random, item: Fact) -> Exchange:
    """The user asks for a fact stated before."""
    return Exchange(item.told(), (Message("user", _question(rng, item)), _answer(item)))


def personal(rng: Random) -> list[tuple[Exchange, Exchange]]:
    """Things a user says about themselves, each with the question for it."""
    name, city, job, hobby = rng.choice(NAMES), rng.choice(CITIES), rng.choice(JOBS), rng.choice(HOBBIES)
    table = (
        (f"My name is {name}.", f"Nice to meet you, {name}.", "What is my name?", f"Your name is {name}."),
        (f"I live in {city}.", f"{city} is a nice city.", "Where do I live?", f"You live in {city}."),
        (f"I work as a {job}.", f"A {job} has a good job.", "What is my job?", f"You work as a {job}."),
        (f"I like {hobby}.", f"I hope you enjoy {hobby}.", "What do I like?", f"You like {hobby}."),
    )
    pairs = []
    for statement, reply, question, answer in rng.sample(table, rng.randint(1, 4)):
        told = Exchange(
            statement,
            (Message("user", statement), Message("assistant", reply, "The user tells me something.")),
        )
        asked = Exchange(
            answer, (Message("user", question), Message("assistant", answer, f"The user said: {statement}"))
        )
        pairs.append((told, asked))
    return pairs


def _question(rng: Random, item: Fact) -> str:
    return rng.choice(_ASK).format(item.subject)


def _answer(item: Fact) -> Message:
    return Message("assistant", item.told(), f"I look for {item.subject}: {item.value}.")
