"""Kinds of questions about pictures. The answer is drawn first, all answers alike, and then a scene that has it.

So a text says nothing about its answer: who does not see the picture is right as often as chance has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from .scene import COLORS, COLUMNS, DIGITS, PICTURE_PX, SHAPES, Figure, Scene, cell_box, cell_of

CELLS = 4
"""Cells on each side of the grids with figures."""
FINE_CELLS = 8
"""Cells on each side of the grids in which lengths and areas are measured."""
EQUAL = "equal"
_MARGIN_PX = 3
"""Least distance of a figure from its cell's border."""
_COLORS = tuple(COLORS)
_RADII_PX = (14, 28)
"""Least and greatest half width of a figure."""
_DIGIT_RADII_PX = (22, 28)
"""The same of a figure with a digit."""
_COMPARED_RADII_PX = (13, 29)
_LEAST_DIFFERENCE_PX = 8
"""Between the half widths of figures of which one is larger."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, such as ``Question("count", "How many circles are there?", ("circle",))``."""

    kind: str
    """One of `KINDS`."""
    text: str
    """For the policy."""
    subjects: tuple[str, ...]
    """Colors and shapes that it names."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of questions."""

    ask: Callable[[Random], Question]
    """Draws a question."""
    answers: Callable[[Question], Sequence[str]]
    """All answers of a question, which are equally frequent."""
    draw: Callable[[Random, Question, str], Scene]
    """Draws a scene in which the question has an answer."""


def _background(rng: Random) -> tuple[int, int, int]:
    return rng.randint(215, 255), rng.randint(215, 255), rng.randint(215, 255)


def _cells(rng: Random, count: int) -> list[tuple[int, int]]:
    return rng.sample([(column, row) for row in range(CELLS) for column in range(CELLS)], count)


def _figure(
    rng: Random,
    cell: tuple[int, int],
    shape: str,
    color: str,
    radii: tuple[int, int] = _RADII_PX,
    digit: str = "",
) -> Figure:
    """Return a figure anywhere in a cell, with a half width within ``radii``."""
    radius = rng.randint(*radii)
    x_start, y_start, x_end, y_end = cell_box(CELLS, *cell)
    x = rng.randint(x_start + _MARGIN_PX, x_end - _MARGIN_PX - 2 * radius)
    y = rng.randint(y_start + _MARGIN_PX, y_end - _MARGIN_PX - 2 * radius)
    return Figure(shape, color, (x, y, x + 2 * radius, y + 2 * radius), digit)


def _scene(rng: Random, figures: Sequence[Figure], cells: int = CELLS) -> Scene:
    return Scene(cells, tuple(rng.sample(figures, len(figures))), _background(rng))


def _except(names: Sequence[str], *excluded: str) -> list[str]:
    return [name for name in names if name not in excluded]


def _ask_count(rng: Random) -> Question:
    if rng.random() < 0.5:
        shape = rng.choice(SHAPES)
        return Question("count", f"How many {shape}s are there?", (shape,))
    color = rng.choice(_COLORS)
    return Question("count", f"How many {color} figures are there?", (color,))


def _draw_count(rng: Random, question: Question, answer: str) -> Scene:
    [subject] = question.subjects
    count = int(answer)
    figures = []
    for number, cell in enumerate(_cells(rng, rng.randint(count, 10))):
        shape, color = rng.choice(_except(SHAPES, subject)), rng.choice(_except(_COLORS, subject))
        if number < count:
            shape, color = (subject, color) if subject in SHAPES else (shape, subject)
        figures.append(_figure(rng, cell, shape, color))
    return _scene(rng, figures)


def _ask_length(rng: Random) -> Question:
    color = rng.choice(_COLORS)
    return Question("length", f"The {color} bar is how many cells long?", (color,))


def _draw_length(rng: Random, question: Question, answer: str) -> Scene:
    """Draw the bar and another one, side by side, over whole cells."""
    [subject] = question.subjects
    first, second = rng.sample(range(FINE_CELLS), 2)
    is_upright = rng.random() < 0.5
    lengths = (int(answer), rng.randint(1, FINE_CELLS))
    colors = (subject, rng.choice(_except(_COLORS, subject)))
    bars = []
    for lane, length, color in zip((first, second), lengths, colors, strict=True):
        start = rng.randint(0, FINE_CELLS - length)
        cells = (lane, start, 1, length) if is_upright else (start, lane, length, 1)
        x, y, x_end, y_end = cell_box(FINE_CELLS, *cells)
        edge = rng.randint(3, 8)  # bars are thinner than their cells and end at cells' borders
        box = (x + edge, y, x_end - edge, y_end) if is_upright else (x, y + edge, x_end, y_end - edge)
        bars.append(Figure("bar", color, box))
    return _scene(rng, bars, FINE_CELLS)


_AREAS: Mapping[str, tuple[tuple[int, int], ...]] = {
    "1": ((1, 1),),
    "2": ((1, 2), (2, 1)),
    "3": ((1, 3), (3, 1)),
    "4": ((2, 2), (1, 4), (4, 1)),
    "6": ((2, 3), (3, 2)),
    "8": ((2, 4), (4, 2)),
    "9": ((3, 3),),
    "12": ((3, 4), (4, 3)),
}
"""Areas in cells, and widths and heights that have them."""


def _ask_area(rng: Random) -> Question:
    color = rng.choice(_COLORS)
    return Question("area", f"The {color} rectangle covers how many cells?", (color,))


def _draw_area(rng: Random, question: Question, answer: str) -> Scene:
    """Draw the rectangle in one half of the picture, and another one in the other half."""
    [subject] = question.subjects
    half = FINE_CELLS // 2
    halves = rng.sample((0, half), 2)
    is_upright = rng.random() < 0.5
    sizes = (rng.choice(_AREAS[answer]), rng.choice(_AREAS[rng.choice([*_AREAS])]))
    colors = (subject, rng.choice(_except(_COLORS, subject)))
    rectangles = []
    for start, (columns, rows), color in zip(halves, sizes, colors, strict=True):
        across, along = rng.randint(start, start + half - columns), rng.randint(0, FINE_CELLS - rows)
        if is_upright:
            across, along = rng.randint(0, FINE_CELLS - columns), rng.randint(start, start + half - rows)
        rectangles.append(Figure("bar", color, cell_box(FINE_CELLS, across, along, columns, rows)))
    return _scene(rng, rectangles, FINE_CELLS)


def _ask_compare(rng: Random) -> Question:
    first, second = rng.sample(_COLORS, 2)
    text = f"Which figure is larger, the {first} one or the {second} one? Or are they equal?"
    return Question("compare", text, (first, second))


def _draw_compare(rng: Random, question: Question, answer: str) -> Scene:
    """Draw two figures of one shape, and some in other colors."""
    least, greatest = _COMPARED_RADII_PX
    if answer == EQUAL:
        radii = [rng.randint(least, greatest)] * 2
    else:
        small = rng.randint(least, greatest - _LEAST_DIFFERENCE_PX)
        radii = [small, rng.randint(small + _LEAST_DIFFERENCE_PX, greatest)]
        radii.sort(reverse=answer == question.subjects[0])
    shape = rng.choice(SHAPES)
    cells = _cells(rng, rng.randint(2, 5))
    figures = [
        _figure(rng, cell, shape, color, (radius, radius))
        for cell, color, radius in zip(cells[:2], question.subjects, radii, strict=True)
    ]
    colors = _except(_COLORS, *question.subjects)
    figures += [_figure(rng, cell, rng.choice(SHAPES), rng.choice(colors)) for cell in cells[2:]]
    return _scene(rng, figures)


def _ask_locate(rng: Random) -> Question:
    color = rng.choice(_COLORS)
    text = f"In which cell is the {color} figure? Columns are A to D from the left, rows 1 to 4 from the top."
    return Question("locate", text, (color,))


_CELL_NAMES = tuple(f"{column}{row + 1}" for row in range(CELLS) for column in COLUMNS[:CELLS])


def _draw_locate(rng: Random, question: Question, answer: str) -> Scene:
    [subject] = question.subjects
    cell = (COLUMNS.index(answer[0]), int(answer[1]) - 1)
    figures = [_figure(rng, cell, rng.choice(SHAPES), subject)]
    free = [(column, row) for row in range(CELLS) for column in range(CELLS) if (column, row) != cell]
    for other_cell in rng.sample(free, rng.randint(1, 6)):
        figures.append(_figure(rng, other_cell, rng.choice(SHAPES), rng.choice(_except(_COLORS, subject))))
    return _scene(rng, figures)


def _ask_color(rng: Random) -> Question:
    shape = rng.choice(SHAPES)
    return Question("color", f"Which color has the {shape}?", (shape,))


def _draw_color(rng: Random, question: Question, answer: str) -> Scene:
    [subject] = question.subjects
    cells = _cells(rng, rng.randint(2, 6))
    figures = [_figure(rng, cells[0], subject, answer)]
    shapes = _except(SHAPES, subject)
    figures += [_figure(rng, cell, rng.choice(shapes), rng.choice(_COLORS)) for cell in cells[1:]]
    return _scene(rng, figures)


def _ask_read(rng: Random) -> Question:
    color = rng.choice(_COLORS)
    return Question("read", f"Which digit is in the {color} figure?", (color,))


def _ask_number(rng: Random) -> Question:
    first, second = rng.sample(_COLORS, 2)
    text = f"Which number do the digits in the {first} and in the {second} figure make, in this order?"
    return Question("number", text, (first, second))


def _draw_digits(rng: Random, question: Question, answer: str) -> Scene:
    """Draw a figure with a digit for each subject, and some in other colors."""
    cells = _cells(rng, len(question.subjects) + rng.randint(1, 3))
    figures = [
        _figure(rng, cell, rng.choice(SHAPES), color, _DIGIT_RADII_PX, digit)
        for cell, color, digit in zip(cells, question.subjects, answer, strict=False)
    ]
    colors = _except(_COLORS, *question.subjects)
    for cell in cells[len(question.subjects) :]:
        digit = rng.choice([*DIGITS])
        figures.append(_figure(rng, cell, rng.choice(SHAPES), rng.choice(colors), _DIGIT_RADII_PX, digit))
    return _scene(rng, figures)


KINDS: Mapping[str, Kind] = {
    "count": Kind(_ask_count, lambda question: tuple("123456"), _draw_count),
    "length": Kind(_ask_length, lambda question: tuple("12345678"), _draw_length),
    "area": Kind(_ask_area, lambda question: tuple(_AREAS), _draw_area),
    "compare": Kind(_ask_compare, lambda question: (*question.subjects, EQUAL), _draw_compare),
    "locate": Kind(_ask_locate, lambda question: _CELL_NAMES, _draw_locate),
    "color": Kind(_ask_color, lambda question: _COLORS, _draw_color),
    "read": Kind(_ask_read, lambda question: tuple(DIGITS), _draw_digits),
    "number": Kind(
        _ask_number, lambda question: tuple(first + second for first in DIGITS for second in DIGITS), _draw_digits
    ),
}
"""Kinds of questions by name: ``read`` and ``number`` need the zoom, for one figure and for two."""

DESCRIBE = "describe"
"""A further kind, for warm starts: what a picture of any other kind shows, figure by figure, which teaches to see."""


def describe(scene: Scene) -> str:
    """Return what a scene shows, in the order of reading, such as ``A1 red circle, C4 blue square``."""
    return ", ".join(
        _name_figure(scene, figure) for figure in sorted(scene.figures, key=lambda figure: cell_of(scene, figure)[::-1])
    )


def _name_figure(scene: Scene, figure: Figure) -> str:
    if figure.shape != "bar":
        column, row = cell_of(scene, figure)
        return f"{COLUMNS[column]}{row + 1} {figure.color} {figure.shape}"
    side = PICTURE_PX // scene.cells
    x, y, x_end, y_end = figure.box
    columns, rows = range(x // side, -(-x_end // side)), range(y // side, -(-y_end // side))
    return f"{COLUMNS[columns.start]}{rows.start + 1} {figure.color} {len(columns)} by {len(rows)}"
