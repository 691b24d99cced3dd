"""The small world the conversations speak of."""

from __future__ import annotations

from random import Random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NOUNS = _words(
    """
    apple anchor arrow bag ball basket bean bear bell bench bird blanket board boat bone book boot bottle
    bowl box branch bread bridge broom brush bucket button cabin cake camel camera candle cap car card
    carpet cart castle cat chain chair chalk cheese cherry clock cloud coat coffee coin comb copper corn
    cotton cow crown cup curtain desk dish dog door dragon drawer dress drum duck eagle ear egg elbow
    engine falcon feather fence field finger fire fish flag flame flower fork fox frog garden gate ghost
    glass glove goat gold grape grass guitar hammer harbor hat heart helmet hill honey hook horn horse
    house island jacket jar jewel kettle key kite knife ladder lake lamp leaf lemon letter lily lion lock
    log magnet map marble market mask meadow melon mill mirror moon mountain mouse nail needle nest net
    nose oak ocean olive onion orange organ otter oven owl paint palace panda paper peach pear pearl pen
    pencil pepper piano pillow pipe plate plow pocket pond potato prism pump queen quilt rabbit radio
    rain ring river road robot rock rope rose ruler saddle sail salt sand scarf school screw seal seed
    shark sheep shell ship shirt shoe silver sink snake snow soap sock sofa spoon spring square stamp
    star stone storm stove sugar sun swan table tail tiger tower train tree trumpet tunnel turtle
    umbrella valley vase violin wagon wall watch water whale wheel window wing winter wire wolf wood yarn
    zebra
    """
)
ADJECTIVES = _words(
    """
    old new small large red blue green yellow black white brown gray purple quiet loud bright dark warm
    cold soft hard heavy light quick slow clean empty full round flat broken wooden golden wet dry young
    strong tiny giant plain
    """
)
VERBS = _words(
    """
    stands waits sleeps rests falls moves turns shines stays hides rolls lies floats hangs grows appears
    """
)
PLACES = _words(
    """
    near behind under above beside inside outside beyond against around
    """
)
NAMES = _words(
    """
    Ada Alan Anna Ben Carl Clara David Diana Edith Emil Eva Felix Flora Fred Grace Greta Hans Helen Hugo
    Ida Ivan Jack Jane Jonas Julia Karl Kate Laura Leo Lina Lucas Maria Mark Max Mia Nina Noah Olga Oscar
    Otto Paul Peter Rita Rosa Ruth Sam Sara Simon Sofia Stella Theo Thomas Tina Tom Vera Victor Walter
    Willa Yusuf Zoe
    """
)
CITIES = _words(
    """
    Athens Berlin Boston Bremen Cairo Delhi Dublin Geneva Hanoi Havana Kyoto Lagos Lima Lisbon London
    Lyon Madrid Milan Moscow Nairobi Oslo Paris Porto Prague Quito Riga Rome Seoul Sofia Sydney Tokyo
    Turin Vienna Warsaw Zurich
    """
)
JOBS = _words(
    """
    baker carpenter doctor driver engineer farmer gardener judge lawyer miner nurse painter pilot poet
    sailor singer tailor teacher waiter writer
    """
)
HOBBIES = _words(
    """
    chess climbing cooking cycling dancing drawing fishing hiking knitting painting reading rowing
    running sailing singing skating skiing surfing swimming writing
    """
)


def sentence(rng: Random) -> str:
    """A sentence that states nothing anybody asks for."""
    form = rng.randrange(6)
    a, b = rng.choice(NOUNS), rng.choice(NOUNS)
    if form == 0:
        return f"The {rng.choice(ADJECTIVES)} {a} {rng.choice(VERBS)} {rng.choice(PLACES)} the {b}."
    if form == 1:
        return f"{rng.choice(NAMES)} saw the {a} {rng.choice(PLACES)} the {rng.choice(ADJECTIVES)} {b}."
    if form == 2:
        return f"In {rng.choice(CITIES)} the {a} is {rng.choice(ADJECTIVES)} and {rng.choice(ADJECTIVES)}."
    if form == 3:
        name, job, hobby = rng.choice(NAMES), rng.choice(JOBS), rng.choice(HOBBIES)
        return f"{name} the {job} likes {hobby} with {rng.choice(NAMES)}."
    if form == 4:
        return f"There are {rng.randint(2, 99)} {rng.choice(ADJECTIVES)} things {rng.choice(PLACES)} the {b}."
    return f"A {a} {rng.choice(VERBS)} and a {b} {rng.choice(VERBS)}."


def digits(rng: Random, count: int) -> str:
    """A string of decimal digits that does not begin with zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))
