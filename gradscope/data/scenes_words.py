"""The words of ``scenes``: from a scene to a caption of 60 to 110 words, every sentence of which is true of the picture.

One sentence per object (size, colour, pattern, kind and place are always said), one each for ground, weather, the thing in
the sky, the birds and the lower edge, then relations and a count. Frames and synonyms are drawn at random and the sentences
are shuffled, so the same scene has very many captions.

How it can mislead: the language is a closed grammar. A model can read it far better than real captions of the same length.
"""

from __future__ import annotations

from itertools import combinations
from random import Random

from gradscope.data.scenes_grammar import SIDES, SKY_THING, Scene, Thing

MIN_WORDS, MAX_WORDS = 60, 110

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six"}
COLOUR_WORDS = {
    "red": ("red", "scarlet"),
    "orange": ("orange", "amber"),
    "yellow": ("yellow", "golden"),
    "green": ("green", "emerald"),
    "blue": ("blue", "navy"),
    "purple": ("purple", "violet"),
    "pink": ("pink", "rose"),
    "white": ("white", "snow white"),
    "black": ("black", "jet black"),
}
SIZE_WORDS = {"small": ("small", "little", "tiny"), "large": ("large", "big", "huge")}
PATTERN_FRAMES = {
    "plain": ("{size} plain {colour} {kind}", "{size} {colour} {kind} without any marks"),
    "striped": ("{size} striped {colour} {kind}", "{size} {colour} {kind} with stripes"),
    "dotted": ("{size} dotted {colour} {kind}", "{size} {colour} {kind} covered in dots"),
    "checked": ("{size} checked {colour} {kind}", "{size} {colour} {kind} with a chess pattern"),
}
KIND_WORDS = {
    "house": ("house", "cottage"),
    "tree": ("round tree", "leafy tree"),
    "pine": ("pine", "fir tree"),
    "car": ("car", "vehicle"),
    "ball": ("ball", "sphere"),
    "tent": ("tent", "camping tent"),
    "tower": ("tower", "pillar"),
    "crate": ("crate", "box"),
    "mushroom": ("mushroom",),
    "flag": ("flag", "banner"),
    "ring": ("ring", "hoop"),
    "star": ("star",),
}
ROW_WORDS = {"back": ("at the back", "in the distance", "far away"), "front": ("at the front", "in the foreground", "close by")}
SIDE_WORDS = {
    "left": ("on the left", "on the left side"),
    "middle": ("in the middle", "in the center"),
    "right": ("on the right", "on the right side"),
}
THING_FRAMES = (
    "{place} there is {thing}",
    "{thing} stands {place}",
    "we can see {thing} {place}",
    "{place} sits {thing}",
    "{thing} is placed {place}",
    "someone has put {thing} {place}",
)
SETTING_FRAMES = {
    "meadow": ("the ground is a green grassy meadow", "everything happens on a meadow of fresh grass"),
    "beach": ("the ground is a sandy beach", "the picture shows a beach with pale sand"),
    "desert": ("the ground is a dry orange desert", "the view opens on a desert with low dunes"),
    "snowfield": ("the ground is covered with snow", "a white field of snow lies below"),
    "plaza": ("the ground is paved with gray stone tiles", "the place is a gray city square with tiles"),
    "field": ("the ground is a brown farm field", "long lines cross a farm field of brown earth"),
}
WEATHER_FRAMES = {
    "clear": ("the sky is bright blue and clear", "it is a fine day under a clear blue sky"),
    "overcast": ("the sky is gray and overcast", "it is a dull day with a gray sky"),
    "rain": ("rain is falling from a dark sky", "it is raining and the sky is dark"),
    "snowfall": ("snow flakes are falling from a pale sky", "it is snowing softly in the cold air"),
    "sunset": ("the sky glows orange and pink at sunset", "it is evening and the sky has turned orange"),
    "night": ("it is night and stars shine in the dark sky", "the dark night sky is full of stars"),
}
SKY_SIDE_WORDS = {
    "left": ("on the left of the sky", "in the upper left corner"),
    "middle": ("in the middle of the sky", "right above the center"),
    "right": ("on the right of the sky", "in the upper right corner"),
}
SKY_FRAMES = {
    "sun": ("the sun shows {place}", "a yellow sun hangs {place}"),
    "moon": ("the moon shows {place}", "a pale moon hangs {place}"),
    "cloud": ("a big cloud floats {place}", "a heavy cloud hangs {place}"),
}
EDGE_WORDS = {"flower": ("flower", "blossom"), "stone": ("stone", "pebble")}
EDGE_FRAMES = (
    "along the bottom edge are {things}",
    "{things} lie in a row at the very bottom",
    "a row of {things} lines the lower edge",
)
TOTAL_FRAMES = ("there are {n} objects in total", "in all {n} objects stand on the ground")


def count_words(text: str) -> int:
    """Words by whitespace, as captions are usually counted."""
    return len(text.split())


def describe(scene: Scene, rng: Random) -> str:
    """A random true caption of ``scene`` with ``MIN_WORDS`` to ``MAX_WORDS`` words; same rng state, same caption."""
    while True:  # very rarely every sentence comes out long; then draw the words again
        caption = _draw_caption(scene, rng)
        if MIN_WORDS <= count_words(caption) <= MAX_WORDS:
            return caption


def _draw_caption(scene: Scene, rng: Random) -> str:
    needed = [_sentence(rng, THING_FRAMES, thing=_noun(rng, t), place=_place(rng, t)) for t in scene.things]
    needed += [
        _sentence(rng, SETTING_FRAMES[scene.setting]),
        _sentence(rng, WEATHER_FRAMES[scene.weather]),
        _sentence(rng, SKY_FRAMES[SKY_THING[scene.weather]], place=rng.choice(SKY_SIDE_WORDS[scene.sky_side])),
        _birds(rng, scene.birds),
        _sentence(rng, EDGE_FRAMES, things=_edge(rng, scene)),
    ]
    optional = [*_relations(scene, rng), _sentence(rng, TOTAL_FRAMES, n=NUMBERS[len(scene.things)])]
    rng.shuffle(optional)
    wanted = rng.choice((0, 1, 2))
    words = sum(map(count_words, needed))
    for number, sentence in enumerate(optional):
        if (number < wanted or words < MIN_WORDS) and words + count_words(sentence) <= MAX_WORDS:
            needed.append(sentence)
            words += count_words(sentence)
    rng.shuffle(needed)
    return " ".join(needed)


def _sentence(rng: Random, frames: tuple[str, ...], **slots: str) -> str:
    text = rng.choice(frames).format(**slots)
    return f"{text[0].upper()}{text[1:]}."


def noun_phrase(rng: Random, *, kind: str, colour: str, size: str, pattern: str) -> str:
    """``a large striped red house``: size, colour, pattern and kind, with synonyms and its article."""
    text = rng.choice(PATTERN_FRAMES[pattern]).format(
        size=rng.choice(SIZE_WORDS[size]), colour=rng.choice(COLOUR_WORDS[colour]), kind=rng.choice(KIND_WORDS[kind])
    )
    return f"a {text}"


def _noun(rng: Random, thing: Thing) -> str:
    return noun_phrase(rng, kind=thing.kind, colour=thing.colour, size=thing.size, pattern=thing.pattern)


def _place(rng: Random, thing: Thing) -> str:
    row, side = thing.place
    return f"{rng.choice(ROW_WORDS[row])} {rng.choice(SIDE_WORDS[side])}"


def _birds(rng: Random, count: int) -> str:
    if count == 1:
        return _sentence(rng, ("one bird flies overhead", "a single bird is in the air"))
    return _sentence(rng, ("{n} birds fly overhead", "{n} birds are in the air"), n=NUMBERS[count])


def _edge(rng: Random, scene: Scene) -> str:
    word = rng.choice(EDGE_WORDS[scene.edge_kind])
    return f"{NUMBERS[scene.edge_count]} {rng.choice(COLOUR_WORDS[scene.edge_colour])} {word}s"


def _relations(scene: Scene, rng: Random) -> list[str]:
    """True relations between objects that can be told apart by colour and kind."""
    names = [(t.colour, t.kind) for t in scene.things]
    named = [t for t, name in zip(scene.things, names, strict=True) if names.count(name) == 1]
    sentences = []
    for a, b in combinations(named, 2):
        if rng.random() < 0.5:
            a, b = b, a
        first, second = (f"{rng.choice(COLOUR_WORDS[t.colour])} {rng.choice(KIND_WORDS[t.kind])}" for t in (a, b))
        sentences.append(_sentence(rng, (f"the {first} is {_relation(a, b)} the {second}",)))
    return sentences


def _relation(a: Thing, b: Thing) -> str:
    shift = SIDES.index(a.place[1]) - SIDES.index(b.place[1])
    if shift:
        return "to the left of" if shift < 0 else "to the right of"
    return "behind" if a.place[0] == "back" else "in front of"
