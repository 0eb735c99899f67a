"""What a scene is, and how scenes are drawn at random: the grammar of the embedded data set ``scenes``.

A scene is an outdoor picture: a ground (setting), a weather with one thing in the sky (sun, moon or cloud, by weather), some
birds, a counted row of little things along the lower edge, and three or four objects on a 2 x 3 grid of places. An object has
a kind, a colour, a size and a pattern.

    layout key   everything except the objects' kind, colour, size and pattern (their places belong to the layout)
    signature    the whole scene in canonical order; two scenes with one signature show and mean the same
    stream       pretrain | train | val | test, a function of the layout key alone (first byte of its SHA-256)
    family       scenes that differ only in one or two attributes of one object; they share the layout key

Because the stream is a function of the layout key, a family lies wholly in one stream, and no signature can occur in two
streams whatever the seeds: nothing has to be compared to keep pretraining, training and test apart.

How it can mislead: streams are disjoint but of one distribution, so a test score here is in-domain. Only the embedded
near-twins make the task hard; a random batch of 16 rarely holds two relatives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from random import Random

SETTINGS = ("meadow", "beach", "desert", "snowfield", "plaza", "field")
WEATHERS = ("clear", "overcast", "rain", "snowfall", "sunset", "night")
SKY_THING = {"clear": "sun", "overcast": "cloud", "rain": "cloud", "snowfall": "cloud", "sunset": "sun", "night": "moon"}
SIDES = ("left", "middle", "right")
BIRDS = (1, 2, 3, 4)
EDGE_KINDS = ("flower", "stone")
EDGE_COUNTS = (2, 3, 4, 5, 6)
EDGE_COLOURS = ("red", "yellow", "blue", "white", "black")
PLACES = tuple(product(("back", "front"), SIDES))
KINDS = ("house", "tree", "pine", "car", "ball", "tent", "tower", "crate", "mushroom", "flag", "ring", "star")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "white", "black")
SIZES = ("small", "large")
PATTERNS = ("plain", "striped", "dotted", "checked")
ATTRIBUTES = {"kind": KINDS, "colour": COLOURS, "size": SIZES, "pattern": PATTERNS}

#: Upper bound (exclusive) of the first hash byte for each stream, in order.
STREAMS = {"pretrain": 128, "train": 184, "val": 200, "test": 256}


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One object of a scene. ``place`` is (row, side), e.g. ``("front", "left")``."""

    kind: str
    colour: str
    size: str
    pattern: str
    place: tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """One picture's meaning. ``jitter`` seeds the harmless drawing variations and is no part of the meaning."""

    setting: str
    weather: str
    sky_side: str
    birds: int
    edge_kind: str
    edge_count: int
    edge_colour: str
    things: tuple[Thing, ...]  # in the order of PLACES
    jitter: int

    def layout_key(self) -> str:
        """The part that all members of a family share."""
        places = "+".join(f"{row}-{side}" for row, side in (thing.place for thing in self.things))
        air = (self.setting, self.weather, self.sky_side, self.birds)
        edge = (self.edge_kind, self.edge_count, self.edge_colour)
        return "/".join(str(part) for part in (*air, *edge, places))

    def signature(self) -> str:
        """The whole meaning as one string; equal for two scenes exactly when they mean the same."""
        return "|".join([self.layout_key(), *(f"{t.size} {t.colour} {t.pattern} {t.kind}" for t in self.things)])

    def stream(self) -> str:
        """The one stream this scene may be used in."""
        first = hashlib.sha256(self.layout_key().encode()).digest()[0]
        return next(name for name, bound in STREAMS.items() if first < bound)


def make_thing(rng: Random, place: tuple[str, str]) -> Thing:
    """One object with independent, uniform attributes."""
    return Thing(kind=rng.choice(KINDS), colour=rng.choice(COLOURS), size=rng.choice(SIZES), pattern=rng.choice(PATTERNS), place=place)


def make_scene(rng: Random, *, stream: str = "pretrain") -> Scene:
    """One random scene of the given stream (drawn again until its layout falls into that stream).

    Raises:
        ValueError: if ``stream`` is not one of ``STREAMS``.
    """
    if stream not in STREAMS:
        raise ValueError(f"unknown scenes stream '{stream}'; choose one of {', '.join(STREAMS)}.")
    while True:
        places = rng.sample(PLACES, rng.choice((3, 4)))
        scene = Scene(
            setting=rng.choice(SETTINGS),
            weather=rng.choice(WEATHERS),
            sky_side=rng.choice(SIDES),
            birds=rng.choice(BIRDS),
            edge_kind=rng.choice(EDGE_KINDS),
            edge_count=rng.choice(EDGE_COUNTS),
            edge_colour=rng.choice(EDGE_COLOURS),
            things=tuple(make_thing(rng, place) for place in sorted(places, key=PLACES.index)),
            jitter=rng.getrandbits(32),
        )
        if scene.stream() == stream:
            return scene


def make_family(rng: Random, *, stream: str, size: int = 4) -> list[Scene]:
    """``size`` scenes, any two of which differ in one or two attributes of one and the same object.

    Two attributes of one object are varied together: the members are distinct pairs of values.

    Raises:
        ValueError: if ``size`` is not in 1..8 (two sizes times four patterns is the smallest pool of pairs).
    """
    if not 1 <= size <= len(SIZES) * len(PATTERNS):
        raise ValueError(f"a scenes family has 1 to 8 members, {size} were asked for.")
    base = make_scene(rng, stream=stream)
    index = rng.randrange(len(base.things))
    first, second = rng.sample(list(ATTRIBUTES), 2)
    pairs = rng.sample(list(product(ATTRIBUTES[first], ATTRIBUTES[second])), size)
    return [_with_thing(base, index, {first: a, second: b}, rng.getrandbits(32)) for a, b in pairs]


def _with_thing(scene: Scene, index: int, change: dict[str, str], jitter: int) -> Scene:
    old = scene.things[index]
    values = {name: change.get(name, getattr(old, name)) for name in ATTRIBUTES}
    new = Thing(place=old.place, **values)
    return replace(scene, things=(*scene.things[:index], new, *scene.things[index + 1 :]), jitter=jitter)


def scenes_of_split(seed: int, stream: str, count: int, *, family_size: int = 4) -> Iterator[tuple[int, Scene]]:
    """``count`` scenes of one stream as (family number, scene), no signature twice, in an order fixed by ``seed``.

    Families follow one another, so neighbours in the file are relatives: shuffle before forming batches.
    """
    rng = Random(f"scenes {seed} {stream}")
    seen: set[str] = set()
    family = 0
    while len(seen) < count:
        members = make_family(rng, stream=stream, size=family_size)
        if any(member.signature() in seen for member in members):
            continue
        for member in members[: count - len(seen)]:
            seen.add(member.signature())
            yield family, member
        family += 1
