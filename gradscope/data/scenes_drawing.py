"""From a scene to a picture of 96 x 96 pixels (RGB), a pure function of the scene.

Sprites and backgrounds are drawn once at four times the size, reduced, and kept; a picture is a background with a few sprites
pasted in at slightly jittered spots and a small change of brightness. The jitter is part of the scene (``Scene.jitter``), so
the same scene always gives the same pixels (with one Pillow version).
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

from PIL import Image, ImageChops, ImageDraw, ImageFilter

from gradscope.data.scenes_grammar import SIDES, SKY_THING, Scene

SIDE = 96
HORIZON = 33
OVER = 4  # drawing happens at OVER times the final size
PIXELS = {"small": 16, "large": 27}
BASELINE = {"back": 61, "front": 87}
RGB = {
    "red": (214, 32, 38),
    "orange": (245, 134, 20),
    "yellow": (247, 219, 40),
    "green": (30, 142, 56),
    "blue": (34, 80, 200),
    "purple": (122, 44, 160),
    "pink": (246, 140, 186),
    "white": (248, 248, 248),
    "black": (28, 28, 30),
}
OUTLINE, WOOD, METAL = (20, 20, 20), (110, 70, 36), (70, 70, 78)
GROUND = {
    "meadow": ((120, 190, 84), (90, 160, 62)),
    "beach": ((238, 220, 168), (214, 192, 136)),
    "desert": ((218, 150, 84), (190, 122, 62)),
    "snowfield": ((232, 238, 246), (200, 212, 228)),
    "plaza": ((160, 160, 164), (116, 116, 122)),
    "field": ((134, 92, 58), (98, 64, 38)),
}
SKY = {
    "clear": ((110, 180, 245), (180, 220, 250)),
    "overcast": ((150, 154, 160), (186, 188, 192)),
    "rain": ((74, 82, 96), (110, 118, 130)),
    "snowfall": ((196, 206, 218), (222, 228, 236)),
    "sunset": ((236, 110, 70), (250, 180, 150)),
    "night": ((14, 18, 52), (40, 46, 92)),
}

Box = tuple[float, float, float, float]
Points = list[tuple[float, float]]
Parts = list[tuple[str, str, Box | Points]]


def _star(points: int, inner: float) -> Points:
    radii = (0.5, inner)
    return [
        (0.5 + radii[i % 2] * math.sin(math.pi * i / points), 0.52 - radii[i % 2] * math.cos(math.pi * i / points))
        for i in range(2 * points)
    ]


#: kind -> parts in the unit box, (role, shape, numbers); "body" takes the colour and the pattern, other roles are fixed.
PARTS: dict[str, Parts] = {
    "house": [("body", "polygon", [(0.02, 0.45), (0.5, 0.02), (0.98, 0.45), (0.88, 0.45), (0.88, 1), (0.12, 1), (0.12, 0.45)])],
    "tree": [("wood", "rectangle", (0.42, 0.6, 0.58, 1)), ("body", "ellipse", (0.08, 0, 0.92, 0.74))],
    "pine": [
        ("wood", "rectangle", (0.43, 0.7, 0.57, 1)),
        ("body", "polygon", [(0.5, 0), (0.78, 0.4), (0.66, 0.4), (0.92, 0.8), (0.08, 0.8), (0.34, 0.4), (0.22, 0.4)]),
    ],
    "car": [
        ("body", "polygon", [(0, 0.55), (0.2, 0.52), (0.32, 0.26), (0.7, 0.26), (0.82, 0.52), (1, 0.58), (1, 0.86), (0, 0.86)]),
        ("outline", "ellipse", (0.1, 0.72, 0.36, 0.98)),
        ("outline", "ellipse", (0.64, 0.72, 0.9, 0.98)),
    ],
    "ball": [("body", "ellipse", (0.08, 0.12, 0.96, 1))],
    "tent": [
        ("body", "polygon", [(0.5, 0.14), (1, 1), (0, 1)]),
        ("outline", "polygon", [(0.5, 0.58), (0.64, 1), (0.36, 1)]),
    ],
    "tower": [("body", "polygon", [(0.3, 1), (0.3, 0.16), (0.22, 0.16), (0.22, 0), (0.78, 0), (0.78, 0.16), (0.7, 0.16), (0.7, 1)])],
    "crate": [("body", "rectangle", (0.08, 0.16, 0.92, 1))],
    "mushroom": [("pale", "rectangle", (0.38, 0.5, 0.62, 1)), ("body", "pieslice", (0.02, 0.06, 0.98, 1.1))],
    "flag": [("metal", "rectangle", (0.12, 0, 0.2, 1)), ("body", "rectangle", (0.2, 0.04, 0.98, 0.56))],
    "ring": [("body", "ring", (0.06, 0.1, 0.94, 0.98))],
    "star": [("body", "polygon", _star(5, 0.22))],
}


def _shape(draw: ImageDraw.ImageDraw, shape: str, numbers: Box | Points, px: int, fill: int | tuple[int, ...]) -> None:
    if shape == "polygon":
        draw.polygon([(x * px, y * px) for x, y in numbers], fill=fill)  # type: ignore[misc]
        return
    x0, y0, x1, y1 = (float(v) * px for v in numbers)  # type: ignore[arg-type]
    if shape == "rectangle":
        draw.rectangle((x0, y0, x1, y1), fill=fill)
    elif shape == "ellipse":
        draw.ellipse((x0, y0, x1, y1), fill=fill)
    elif shape == "pieslice":
        draw.pieslice((x0, y0, x1, y1), 180, 360, fill=fill)
    elif shape == "ring":
        draw.ellipse((x0, y0, x1, y1), outline=fill, width=round(0.22 * px))


def fill_pattern(size: int, colour: str, pattern: str, period: int) -> Image.Image:
    """A square of ``size`` pixels in the colour with its pattern; ``period`` is the pattern's repeat in pixels."""
    accent = RGB["black"] if colour in ("white", "yellow") else RGB["white"]
    image = Image.new("RGB", (size, size), RGB[colour])
    draw = ImageDraw.Draw(image)
    half = period // 2
    steps = range(0, size, period)
    if pattern == "striped":
        for x in steps:
            draw.rectangle((x + half, 0, x + period - 1, size), fill=accent)
    elif pattern == "dotted":
        for x in steps:
            for y in steps:
                draw.ellipse((x + half // 2, y + half // 2, x + half // 2 + half, y + half // 2 + half), fill=accent)
    elif pattern == "checked":
        for x in steps:
            for y in steps:
                draw.rectangle((x, y, x + half - 1, y + half - 1), fill=accent)
                draw.rectangle((x + half, y + half, x + period - 1, y + period - 1), fill=accent)
    return image


@lru_cache(maxsize=20_000)
def sprite(kind: str, colour: str, pattern: str, px: int) -> Image.Image:
    """One object of a known kind, see ``draw_parts``."""
    return draw_parts(PARTS[kind], colour, pattern, px)


def draw_parts(parts: Parts, colour: str, pattern: str, px: int) -> Image.Image:
    """Parts as an RGBA image of ``px`` x ``px`` pixels, each with a dark outline."""
    big = px * OVER
    roles = {"outline": OUTLINE, "wood": WOOD, "metal": METAL, "pale": (236, 226, 206)}
    canvas = Image.new("RGBA", (big, big), (0, 0, 0, 0))
    fill = fill_pattern(big, colour, pattern, max(6, round(px / 27 * 8)) * OVER)
    for role, shape, numbers in parts:
        mask = Image.new("L", (big, big), 0)
        _shape(ImageDraw.Draw(mask), shape, numbers, big - 1, 255)
        canvas.paste(Image.new("RGBA", (big, big), (*OUTLINE, 255)), mask=mask)
        inner = ImageChops.darker(mask, mask.filter(ImageFilter.MinFilter(2 * (OVER // 2) + 1)))
        paint = fill if role == "body" else Image.new("RGB", (big, big), roles[role])
        canvas.paste(paint.convert("RGBA"), mask=inner)
    return canvas.resize((px, px), Image.Resampling.BOX)


@lru_cache(maxsize=64)
def background(setting: str, weather: str) -> Image.Image:
    """Sky and ground without anything on them."""
    image = Image.new("RGB", (SIDE, SIDE))
    draw = ImageDraw.Draw(image)
    top, low = SKY[weather]
    for y in range(HORIZON):
        draw.line((0, y, SIDE, y), fill=tuple(round(a + (b - a) * y / HORIZON) for a, b in zip(top, low, strict=True)))
    ground, mark = GROUND[setting]
    draw.rectangle((0, HORIZON, SIDE, SIDE), fill=ground)
    _ground_marks(draw, setting, mark)
    _weather_marks(draw, weather)
    return image


def _ground_marks(draw: ImageDraw.ImageDraw, setting: str, mark: tuple[int, int, int]) -> None:
    rng = Random(setting)
    if setting == "plaza":
        for y in range(HORIZON, SIDE, 9):
            draw.line((0, y, SIDE, y), fill=mark)
        for x in range(-SIDE, 2 * SIDE, 16):
            draw.line((SIDE / 2 + (x - SIDE / 2) * 0.6, HORIZON, x, SIDE), fill=mark)
    elif setting == "field":
        for y in range(HORIZON + 2, SIDE, 5):
            draw.line((0, y, SIDE, y + 2), fill=mark, width=2)
    elif setting == "desert":
        for y in range(HORIZON + 6, SIDE, 14):
            draw.arc((rng.randrange(-30, 10), y, rng.randrange(70, 130), y + 22), 180, 360, fill=mark, width=2)
    else:
        for _ in range(90):
            x, y = rng.randrange(SIDE), rng.randrange(HORIZON + 1, SIDE)
            draw.line((x, y, x, y + 2) if setting == "meadow" else (x, y, x + 1, y), fill=mark)


def _weather_marks(draw: ImageDraw.ImageDraw, weather: str) -> None:
    rng = Random(weather)
    spots = [(rng.randrange(SIDE), rng.randrange(HORIZON)) for _ in range(34)]
    for x, y in spots:
        if weather == "rain":
            draw.line((x, y, x - 2, y + 6), fill=(180, 200, 224))
        elif weather == "snowfall":
            draw.rectangle((x, y, x + 1, y + 1), fill=(255, 255, 255))
        elif weather == "night":
            draw.point((x, y), fill=(250, 250, 210))


@lru_cache(maxsize=8)
def _sky_thing(name: str) -> Image.Image:
    px = 20 * OVER
    image = Image.new("RGBA", (px, px), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    if name == "cloud":
        for box in ((0, 0.4, 0.5, 0.85), (0.25, 0.15, 0.75, 0.8), (0.5, 0.38, 1, 0.85)):
            draw.ellipse([v * px for v in box], fill=(244, 246, 250, 255))
    else:
        colour = (255, 232, 90, 255) if name == "sun" else (240, 238, 214, 255)
        draw.ellipse([v * px for v in (0.12, 0.12, 0.88, 0.88)], fill=colour)
        if name == "moon":
            draw.ellipse([v * px for v in (0.36, 0.02, 1.0, 0.7)], fill=(0, 0, 0, 0))
    return image.resize((20, 20), Image.Resampling.BOX)


@lru_cache(maxsize=32)
def _edge_thing(kind: str, colour: str) -> Image.Image:
    px = 9 * OVER
    image = Image.new("RGBA", (px, px), (0, 0, 0, 0))
    draw = ImageDraw.Draw(image)
    if kind == "stone":
        draw.ellipse((0, px // 3, px - 1, px - 1), fill=(*RGB[colour], 255), outline=OUTLINE, width=OVER)
    else:
        draw.line((px // 2, px // 2, px // 2, px), fill=(20, 90, 30, 255), width=OVER)
        draw.polygon([(x * px, 0.75 * y * px) for x, y in _star(4, 0.3)], fill=(*RGB[colour], 255), outline=OUTLINE)
    return image.resize((9, 9), Image.Resampling.BOX)


def render(scene: Scene) -> Image.Image:
    """The picture of ``scene``: RGB, 96 x 96 pixels."""
    rng = Random(scene.jitter)
    image = background(scene.setting, scene.weather).copy()
    draw = ImageDraw.Draw(image)
    _draw_sky(image, draw, scene, rng)
    for thing in scene.things:
        px = PIXELS[thing.size]
        row, side = thing.place
        x = SIDES.index(side) * 32 + 16 - px // 2 + rng.randint(-2, 2)
        y = BASELINE[row] - px + rng.randint(-1, 1)
        image.paste(piece := sprite(thing.kind, thing.colour, thing.pattern, px), (x, y), piece)
    piece = _edge_thing(scene.edge_kind, scene.edge_colour)
    left = SIDE // 2 - 7 * scene.edge_count + rng.randint(-6, 6)
    for number in range(scene.edge_count):
        image.paste(piece, (left + 14 * number + rng.randint(-1, 1), SIDE - 9), piece)
    light = rng.uniform(-0.08, 0.08)
    return Image.blend(image, Image.new("RGB", image.size, (255, 255, 255) if light > 0 else (0, 0, 0)), abs(light))


def _draw_sky(image: Image.Image, draw: ImageDraw.ImageDraw, scene: Scene, rng: Random) -> None:
    piece = _sky_thing(SKY_THING[scene.weather])
    column = SIDES.index(scene.sky_side)
    image.paste(piece, (column * 32 + 6 + rng.randint(-3, 3), 1 + rng.randint(0, 2)), piece)
    ink = (236, 236, 240) if scene.weather in ("night", "rain") else (24, 24, 28)
    free = [(x * 32 + dx, y) for x in range(3) if x != column for dx in (9, 23) for y in (9, 22)]
    for x, y in rng.sample(free, scene.birds):
        y += rng.randint(-2, 2)
        draw.line((x - 5, y - 3, x, y + 1, x + 5, y - 3), fill=ink, width=2)
