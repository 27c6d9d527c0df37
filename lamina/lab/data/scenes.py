"""Embedded stand-in for captioned photographs: drawn scenes of coloured shapes, each with five captions.

A scene has three to six shapes in the cells of a 3x3 grid. A caption mentions some of them. Features are computed from
the pixels, not from the symbols, so that retrieval has to be learned. All sums are of whole numbers that float32 holds
exactly: every machine computes the same bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .formats import Array, lines_array

SIZES = {"train": 2000, "valid": 200, "test": 200}
TITLE = "drawn scenes of coloured shapes (embedded: 2,000 + 200 + 200)"
STAND_IN = TITLE.replace("embedded", "embedded stand-in for {}")
SIDE, GRID, CELL = 48, 3, 16  # pixels of a picture, cells of its grid, pixels of a cell
MOST = 6  # shapes in a scene
CAPTIONS = 5
FILTERS, PATCH, STRIDE = 48, 6, 3  # random filters, and the pixels of the patches that they look at
COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 79, 200),
    "yellow": (240, 214, 40),
    "purple": (150, 60, 190),
    "orange": (255, 127, 14),
    "white": (250, 250, 250),
    "pink": (247, 150, 194),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
BACKGROUNDS = {"black": (15, 15, 18), "grey": (112, 112, 118), "brown": (92, 64, 40)}
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")

NAMES = {"circle": ("circle", "disc"), "square": ("square", "box"), "cross": ("cross", "plus sign")}
RELATIONS = {
    (0, -1): ("above", "over"),
    (0, 1): ("below", "under"),
    (1, -1): ("to the left of", "left of"),
    (1, 1): ("to the right of", "right of"),
}
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


class Scenes(NamedTuple):
    """Symbols of N scenes: [N] and, for up to six shapes, [N, 6]; cells number the grid by rows."""

    counts: Array
    backgrounds: Array
    shapes: Array
    colours: Array
    large: Array
    cells: Array
    shifts: Array  # [N, 6, 2], pixels from the corner of the cell


class Thing(NamedTuple):
    """One shape, as the grammar sees it."""

    shape: str
    colour: str
    large: int
    cell: tuple[int, int]  # row and column


def arrays() -> dict[str, Array]:
    """Return features, names and captions of the three splits."""
    features, captions = _features(), _captions()
    found: dict[str, Array] = {}
    for split, part in _parts().items():
        found[f"{split}_x"] = features[part]
        found[f"{split}_names"] = lines_array([name_of(number) for number in range(part.start, part.stop)])
        found[f"{split}_captions"] = lines_array(captions[CAPTIONS * part.start : CAPTIONS * part.stop])
    return found


def name_of(number: int) -> str:
    """Return the name of a scene."""
    return f"scene-{number:04d}"


def picture(name: str) -> Array:
    """Return the picture of a scene, uint8 [SIDE, SIDE, 3]."""
    picture: Array = _pictures()[int(name.removeprefix("scene-"))]
    return picture


def _parts() -> dict[str, slice]:
    ends = np.cumsum(list(SIZES.values())).tolist()
    return {split: slice(end - SIZES[split], end) for split, end in zip(SIZES, ends)}


@lru_cache(maxsize=1)
def _scenes() -> Scenes:
    """Draw the symbols. A legacy generator: its numbers are frozen."""
    draw, total = np.random.RandomState(7), sum(SIZES.values())
    slots = (total, MOST)
    cells = draw.random_sample((total, GRID * GRID)).argsort(1)[:, :MOST]
    large = draw.randint(0, 2, slots)
    # a small shape of 9 pixels moves within its cell; a large one of 15 fills it
    shifts = np.where(large[..., None], draw.randint(0, 2, (*slots, 2)), draw.randint(0, 8, (*slots, 2)))
    counts, backgrounds = draw.randint(3, MOST + 1, total), draw.randint(0, len(BACKGROUNDS), total)
    shapes, colours = draw.randint(0, len(SHAPES), slots), draw.randint(0, len(COLOURS), slots)
    return Scenes(counts, backgrounds, shapes, colours, large, cells, shifts)


def _stamp(shape: str, side: int) -> Array:
    """Return which pixels of a square a shape covers."""
    radius = side // 2
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    covered: Array = {
        "circle": x * x + y * y <= radius * (radius + 0.5),
        "square": np.maximum(abs(x), abs(y)) < radius,
        "triangle": 2 * abs(x) <= y + radius,
        "cross": np.minimum(abs(x), abs(y)) <= radius // 4,
        "diamond": abs(x) + abs(y) <= radius,
        "ring": (x * x + y * y <= radius * (radius + 0.5)) & (x * x + y * y > (radius * 0.5) ** 2),
    }[shape]
    return covered


@lru_cache(maxsize=1)
def _pictures() -> Array:
    """Draw all scenes, slot by slot, on backgrounds with a little noise."""
    scenes, total = _scenes(), sum(SIZES.values())
    palette = np.array(list(COLOURS.values()), np.uint8)
    stamps = np.zeros((2, len(SHAPES), 15, 15), bool)
    for number, shape in enumerate(SHAPES):
        stamps[0, number, :9, :9], stamps[1, number] = _stamp(shape, 9), _stamp(shape, 15)
    noise = np.random.RandomState(8).randint(0, 12, (total, SIDE, SIDE, 1), np.uint8)
    pictures = np.array(list(BACKGROUNDS.values()), np.uint8)[scenes.backgrounds][:, None, None] - noise
    offsets = np.arange(15)
    for slot in range(MOST):
        shown = np.flatnonzero(scenes.counts > slot)
        row, column = np.divmod(scenes.cells[shown, slot], GRID)
        y = (CELL * row + scenes.shifts[shown, slot, 0])[:, None, None] + offsets[:, None]
        x = (CELL * column + scenes.shifts[shown, slot, 1])[:, None, None] + offsets
        case, dy, dx = np.nonzero(stamps[scenes.large[shown, slot], scenes.shapes[shown, slot]])
        places = shown[case], y[case, dy, 0], x[case, 0, dx]
        pictures[places] = palette[scenes.colours[shown[case], slot]]
    return pictures


@lru_cache(maxsize=1)
def _features() -> Array:
    """Return rows of length 1: random filters, rectified, and their mean over each of 3x3 regions."""
    pictures = _pictures()
    draw = np.random.RandomState(9)
    filters = draw.randint(-4, 5, (PATCH * PATCH * 3, FILTERS)).astype(np.float32)
    sums = np.empty((len(pictures), GRID * GRID * FILTERS))
    for first in range(0, len(pictures), 100):
        part = pictures[first : first + 100] >> 3  # five bits: sums stay exact
        patches = np.lib.stride_tricks.sliding_window_view(part, (PATCH, PATCH), axis=(1, 2))[:, ::STRIDE, ::STRIDE]
        across = patches.shape[1]
        responses = patches.reshape(len(part) * across * across, -1).astype(np.float32) @ filters
        sums[first : first + 100] = _pooled(np.maximum(responses, 0).reshape(len(part), across, across, FILTERS))
    rows: Array = (sums / np.sqrt((sums * sums).sum(1, keepdims=True))).astype(np.float32)
    return rows


def _pooled(responses: Array) -> Array:
    regions = responses.shape[1] // GRID
    blocks = responses.reshape(len(responses), GRID, regions, GRID, regions, FILTERS)
    summed: Array = blocks.sum((2, 4)).reshape(len(responses), -1)
    return summed


# The grammar. Every sentence has six to 25 words.


@lru_cache(maxsize=1)
def _captions() -> list[str]:
    """Return five captions of each scene."""
    scenes = _scenes()
    total = len(scenes.counts)
    draws = np.random.RandomState(10).randint(0, 2**16, (total, CAPTIONS, 6)).tolist()
    orders = np.random.RandomState(11).random_sample((total, CAPTIONS, MOST))
    orders[np.broadcast_to(np.arange(MOST) >= scenes.counts[:, None, None], orders.shape)] = 2.0  # absent ones last
    mentioned = orders.argsort(2)[:, :, :3].tolist()
    backgrounds = [list(BACKGROUNDS)[number] for number in scenes.backgrounds]
    return [
        _sentence([things[k] for k in mentioned[i][n]], int(scenes.counts[i]), backgrounds[i], draws[i][n])
        for i, things in enumerate(_things(scenes))
        for n in range(CAPTIONS)
    ]


def _things(scenes: Scenes) -> list[list[Thing]]:
    shapes, colours = np.array(SHAPES)[scenes.shapes].tolist(), np.array(list(COLOURS))[scenes.colours].tolist()
    rows, columns = (part.tolist() for part in np.divmod(scenes.cells, GRID))
    cells = [list(zip(*pair)) for pair in zip(rows, columns)]
    return [[Thing(*one) for one in zip(*scene)] for scene in zip(shapes, colours, scenes.large.tolist(), cells)]


def _sentence(things: list[Thing], count: int, background: str, draws: list[int]) -> str:
    """Say one of six things about up to three of a scene's shapes; ``draws`` chooses the words."""
    first, second, third = (_phrase(thing, draw) for thing, draw in zip(things, draws[:3]))
    relation, form = _relation(things[0], things[1], draws[3]), draws[4] % 6
    if form == 0:
        return f"there is {first} {_place(things[0], draws[5])}"
    if form == 1:
        return f"{first} is {relation} {second}"
    if form == 2:
        return f"{first} {second} and {third} on a {background} background"
    if form == 3:
        return f"{NUMBERS[count]} shapes with {first} {relation} {second}"
    if form == 4:
        return f"{first} {relation} {second} and {third} {_place(things[2], draws[5])}"
    return f"the {background} picture shows {first} and {second}"


def _phrase(thing: Thing, draw: int) -> str:
    """Name a shape; its size in one of two cases."""
    names = NAMES.get(thing.shape, (thing.shape,))
    sizes = ("large", "big") if thing.large else ("small", "little")
    words = [sizes[draw // 2 % 2]] * (draw % 2) + [thing.colour, names[draw // 4 % len(names)]]
    return " ".join(["an" if words[0] == "orange" else "a", *words])


def _relation(thing: Thing, other: Thing, draw: int) -> str:
    """Say where a shape is, seen from another, along an axis on which they differ."""
    differing = [axis for axis in (0, 1) if thing.cell[axis] != other.cell[axis]]
    axis = differing[draw % len(differing)]
    return RELATIONS[axis, 1 if thing.cell[axis] > other.cell[axis] else -1][draw // 2 % 2]


def _place(thing: Thing, draw: int) -> str:
    """Say where in the picture a shape is."""
    row, column = ROWS[thing.cell[0]], COLUMNS[thing.cell[1]]
    if row == "middle" and column == "centre":
        return ("in the middle", "in the centre of the picture")[draw % 2]
    if row == "middle":
        return (f"on the {column}", f"at the {column} edge")[draw % 2]
    if column == "centre":
        return f"at the {row}"
    return (f"in the {row} {column} corner", f"at the {row} {column}")[draw % 2]
