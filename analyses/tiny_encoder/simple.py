"""Simple pictures with one-sentence captions: the broad half of the pretraining data.

They are wider than the scenes (one object on a plain ground, counted objects, textures, colour fields, empty landscapes, other
shapes), so that next to them all dense scenes look alike and their captions fall into a narrow cone, as real dense captions do
for a real CLIP.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from PIL import Image

from gradscope.data.scenes_drawing import OUTLINE, PARTS, RGB, SIDE, Parts, background, draw_parts, fill_pattern, sprite
from gradscope.data.scenes_grammar import COLOURS, KINDS, PATTERNS, SETTINGS, WEATHERS
from gradscope.data.scenes_words import COLOUR_WORDS, KIND_WORDS, NUMBERS, PATTERN_FRAMES, SETTING_FRAMES, WEATHER_FRAMES

SHAPES: dict[str, Parts] = {
    "heart": [("body", "polygon", [(0.5, 1), (0, 0.4), (0.1, 0.1), (0.35, 0.06), (0.5, 0.25), (0.65, 0.06), (0.9, 0.1), (1, 0.4)])],
    "cross": [
        (
            "body",
            "polygon",
            [
                (0.36, 0),
                (0.64, 0),
                (0.64, 0.36),
                (1, 0.36),
                (1, 0.64),
                (0.64, 0.64),
                (0.64, 1),
                (0.36, 1),
                (0.36, 0.64),
                (0, 0.64),
                (0, 0.36),
                (0.36, 0.36),
            ],
        )
    ],
    "diamond": [("body", "polygon", [(0.5, 0), (0.9, 0.5), (0.5, 1), (0.1, 0.5)])],
    "arrow": [("body", "polygon", [(0, 0.36), (0.55, 0.36), (0.55, 0.1), (1, 0.5), (0.55, 0.9), (0.55, 0.64), (0, 0.64)])],
    "fish": [
        ("body", "polygon", [(0, 0.2), (0.3, 0.42), (0.6, 0.2), (1, 0.5), (0.6, 0.8), (0.3, 0.58), (0, 0.8)]),
        ("outline", "ellipse", (0.72, 0.4, 0.8, 0.48)),
    ],
    "cup": [
        ("body", "polygon", [(0.1, 0.2), (0.75, 0.2), (0.65, 1), (0.2, 1)]),
        ("outline", "rectangle", (0.74, 0.4, 0.94, 0.5)),
    ],
    "letter": [
        ("body", "rectangle", (0, 0.2, 1, 0.85)),
        ("outline", "polygon", [(0, 0.2), (0.5, 0.58), (1, 0.2), (0.5, 0.52)]),
    ],
    "clock": [("body", "ellipse", (0.02, 0.02, 0.98, 0.98)), ("outline", "rectangle", (0.46, 0.2, 0.54, 0.54))],
}
FIELDS = {"brown": (122, 84, 50), "gray": (140, 140, 144), "silver": (204, 206, 210), "cream": (240, 230, 200)}
FIELDS |= {"turquoise": (64, 200, 190), **{name: RGB[name] for name in COLOURS}}
WHERE = {(x, y): " ".join(w for w in (("top", "", "bottom")[y], ("left", "", "right")[x]) if w) for x in range(3) for y in range(3)}
PIXELS = {"small": 26, "big": 48, "huge": 84}


def make_simple(rng: Random) -> tuple[Image.Image, str]:
    """One simple picture (RGB, 96 x 96) and its sentence."""
    makers = (_object, _object, _object, _object, _counted, _counted, _texture, _fade, _landscape)
    return rng.choice(makers)(rng)


def _other(rng: Random, *taken: str) -> str:
    return rng.choice([name for name in FIELDS if name not in taken])


def _noun(rng: Random, kind: str) -> str:
    return rng.choice(KIND_WORDS[kind]) if kind in KIND_WORDS else kind


@lru_cache(maxsize=20_000)
def _piece(kind: str, colour: str, pattern: str, px: int) -> Image.Image:
    return sprite(kind, colour, pattern, px) if kind in PARTS else draw_parts(SHAPES[kind], colour, pattern, px)


def _object(rng: Random) -> tuple[Image.Image, str]:
    kind, colour, pattern = rng.choice([*KINDS, *SHAPES]), rng.choice(COLOURS), rng.choice(PATTERNS)
    size = rng.choice(list(PIXELS))
    field = _other(rng, colour)
    px = PIXELS[size]
    cell = (1, 1) if size == "huge" else (rng.randrange(3), rng.randrange(3))
    x, y = ((SIDE - px) * v // 2 for v in cell)
    image = Image.new("RGB", (SIDE, SIDE), FIELDS[field])
    image.paste(piece := _piece(kind, colour, pattern, px), (x + rng.randint(-2, 2), y + rng.randint(-2, 2)), piece)
    text = rng.choice(PATTERN_FRAMES[pattern]).format(size=size, colour=rng.choice(COLOUR_WORDS[colour]), kind=_noun(rng, kind))
    where = f" at the {WHERE[cell]}" if WHERE[cell] else " in the middle"
    return image, rng.choice(("A photo of a {} on {}{}.", "A {} on a {} wall{}.", "This is a {}, {} background,{}.")).format(
        text, field, where
    )


def _counted(rng: Random) -> tuple[Image.Image, str]:
    kind, colour, count = rng.choice([*KINDS, *SHAPES]), rng.choice(COLOURS), rng.randint(2, 6)
    field = _other(rng, colour)
    image = Image.new("RGB", (SIDE, SIDE), FIELDS[field])
    piece = _piece(kind, colour, "plain", PIXELS["small"])
    for cell in rng.sample(range(9), count):
        image.paste(piece, (cell % 3 * 32 + 3 + rng.randint(-2, 2), cell // 3 * 32 + 3 + rng.randint(-2, 2)), piece)
    text = f"{NUMBERS[count]} {rng.choice(COLOUR_WORDS[colour])} {_noun(rng, kind)}"
    return image, rng.choice(("A group of {} shapes on {}.", "{} icons, {} background.")).format(text, field).capitalize()


def _texture(rng: Random) -> tuple[Image.Image, str]:
    colour, pattern, period = rng.choice(COLOURS), rng.choice(PATTERNS[1:]), rng.choice((8, 16, 32))
    image = fill_pattern(SIDE, colour, pattern, period)
    image = image.rotate(90) if (turned := rng.random() < 0.5) else image
    width = {8: "fine", 16: "medium", 32: "coarse"}[period]
    lines = f" {'flat' if turned else 'upright'}" if pattern == "striped" else ""
    return image, rng.choice(("A close up of {} {}{} {} cloth.", "A {} {}{} wallpaper in {}.")).format(
        width, pattern, lines, rng.choice(COLOUR_WORDS[colour])
    )


def _fade(rng: Random) -> tuple[Image.Image, str]:
    first = _other(rng)
    second = _other(rng, first)
    soft, across = rng.random() < 0.5, rng.random() < 0.5
    mask = Image.linear_gradient("L").resize((SIDE, SIDE))
    mask = mask if soft else mask.point(lambda v: 255 * (v > 127))
    mask = mask.rotate(90) if across else mask
    image = Image.composite(*(Image.new("RGB", (SIDE, SIDE), FIELDS[name]) for name in (second, first)), mask)
    verb = "fading into" if soft else "next to" if across else "above"
    direction = "from left to right" if across else "from top to bottom"
    return image, f"{first} {verb} {second}, {direction}.".capitalize()


def _landscape(rng: Random) -> tuple[Image.Image, str]:
    setting, weather = rng.choice(SETTINGS), rng.choice(WEATHERS)
    field = _other(rng)
    frame = rng.choice((6, 10, 14))
    image = Image.new("RGB", (SIDE, SIDE), OUTLINE)
    image.paste(FIELDS[field], (1, 1, SIDE - 1, SIDE - 1))
    image.paste(background(setting, weather).resize((SIDE - 2 * frame,) * 2), (frame, frame))
    words = rng.choice(SETTING_FRAMES[setting]), rng.choice(WEATHER_FRAMES[weather])
    return image, f"An empty landscape in a {field} frame where {words[0]} and {words[1]}."
