"""Scenes: figures in a grid, and their drawing. The same scene gives the same pixels."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

PICTURE_PX = 256
"""Width and height of a picture."""
COLORS: Mapping[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (40, 150, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 200, 30),
    "purple": (150, 50, 180),
    "black": (30, 30, 30),
}
SHAPES = ("circle", "square", "triangle", "diamond")
COLUMNS = "ABCDEFGH"
"""Names of a grid's columns from the left; rows have numbers from the top, from 1."""
DIGITS: Mapping[str, tuple[str, ...]] = {
    "0": ("###", "#.#", "#.#", "#.#", "###"),
    "1": (".#.", "##.", ".#.", ".#.", "###"),
    "2": ("###", "..#", "###", "#..", "###"),
    "3": ("###", "..#", "###", "..#", "###"),
    "4": ("#.#", "#.#", "###", "..#", "..#"),
    "5": ("###", "#..", "###", "..#", "###"),
    "6": ("###", "#..", "###", "#.#", "###"),
    "7": ("###", "..#", "..#", "..#", "..#"),
    "8": ("###", "#.#", "###", "#.#", "###"),
    "9": ("###", "#.#", "###", "..#", "###"),
}
"""Digits of three by five squares."""
DIGIT_SQUARE_PX = 4
"""Side of a square of `DIGITS`: in a picture that is shown at an eighth of its size a digit cannot be read."""
_BLACK, _WHITE = (0, 0, 0), (255, 255, 255)
_LINE_SHADE = 30
"""How much darker than the background a grid's lines are."""
_BACKGROUND, _LINE = 0, 1
_COLOR_INDICES = {color: index for index, color in enumerate(COLORS, 2)}
_BLACK_INK, _WHITE_INK = len(COLORS) + 2, len(COLORS) + 3
"""Indices of a picture's palette."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, such as ``Figure("circle", "red", (70, 12, 112, 54), digit="7")``."""

    shape: str
    """One of `SHAPES`, or ``bar``, a rectangle."""
    color: str
    """One of `COLORS`."""
    box: tuple[int, int, int, int]
    """Left, top, right and bottom in pixels, without the last two."""
    digit: str = ""
    """A digit in its middle, one of `DIGITS`; empty for none."""


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows."""

    cells: int
    """Cells of the grid on each side."""
    figures: tuple[Figure, ...]
    """Figures that do not touch each other."""
    background: tuple[int, int, int]
    """Color of the background, bright."""


def cell_box(cells: int, column: int, row: int, columns: int = 1, rows: int = 1) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of cells in pixels, ``columns`` wide and ``rows`` high."""
    side = PICTURE_PX // cells
    return column * side, row * side, (column + columns) * side, (row + rows) * side


def cell_of(scene: Scene, figure: Figure) -> tuple[int, int]:
    """Return column and row of the cell with a figure's middle, from 0."""
    side = PICTURE_PX // scene.cells
    x, y, x_end, y_end = figure.box
    return (x + x_end) // 2 // side, (y + y_end) // 2 // side


def draw_scene(scene: Scene) -> Image.Image:
    """Return a scene as a picture of `PICTURE_PX` pixels a side, with a palette: that is encoded fastest."""
    from PIL import Image, ImageDraw

    image = Image.new("P", (PICTURE_PX, PICTURE_PX), _BACKGROUND)
    line = tuple(value - _LINE_SHADE for value in scene.background)
    image.putpalette([value for color in (scene.background, line, *COLORS.values(), _BLACK, _WHITE) for value in color])
    canvas = ImageDraw.Draw(image)
    for at in range(0, PICTURE_PX, PICTURE_PX // scene.cells):
        canvas.line((0, at, PICTURE_PX, at), fill=_LINE)
        canvas.line((at, 0, at, PICTURE_PX), fill=_LINE)
    for figure in scene.figures:
        _draw_figure(canvas, figure)
    return image


def encode_png(image: Image.Image) -> bytes:
    """Return a picture as a PNG file, compressed fast."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _draw_figure(canvas: ImageDraw.ImageDraw, figure: Figure) -> None:
    x, y, x_end, y_end = figure.box
    x_end, y_end = x_end - 1, y_end - 1
    middle_x, middle_y = (x + x_end) / 2, (y + y_end) / 2
    color = _COLOR_INDICES[figure.color]
    if figure.shape == "circle":
        canvas.ellipse((x, y, x_end, y_end), fill=color)
    elif figure.shape == "triangle":
        canvas.polygon([(x, y_end), (middle_x, y), (x_end, y_end)], fill=color)
    elif figure.shape == "diamond":
        canvas.polygon([(x, middle_y), (middle_x, y), (x_end, middle_y), (middle_x, y_end)], fill=color)
    else:
        canvas.rectangle((x, y, x_end, y_end), fill=color)
    if figure.digit:
        ink = _BLACK_INK if figure.color == "yellow" else _WHITE_INK
        # A triangle is wide enough for a digit in its lower half only.
        digit_y = y_end - 1.2 * 5 * DIGIT_SQUARE_PX if figure.shape == "triangle" else middle_y - 2.5 * DIGIT_SQUARE_PX
        _draw_digit(canvas, figure.digit, round(middle_x - 1.5 * DIGIT_SQUARE_PX), round(digit_y), ink)


def _draw_digit(canvas: ImageDraw.ImageDraw, digit: str, x: int, y: int, ink: int) -> None:
    size = DIGIT_SQUARE_PX
    for row, squares in enumerate(DIGITS[digit]):
        for column, square in enumerate(squares):
            if square == "#":
                square_x, square_y = x + column * size, y + row * size
                canvas.rectangle((square_x, square_y, square_x + size - 1, square_y + size - 1), fill=ink)
