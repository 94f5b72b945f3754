"""Pictures whose answers are read from their pixels here, without the scenes that they were drawn from."""

import re
from collections import Counter
from random import Random

import numpy as np
import pytest
from agentrl_envs.geometry import GeometryEnv
from agentrl_tasks.geometry import Geometry
from agentrl_tasks.geometry.demonstrator import FAULTS
from agentrl_tasks.geometry.questions import KINDS
from agentrl_tasks.geometry.scene import COLORS, DIGITS, SHAPES
from numpy.typing import NDArray

from agentrl.core.errors import ConfigError, UnknownNameError
from agentrl.core.task import Task
from agentrl.core.types import Message, ToolCall

CELL_PX, FINE_PX = 64, 32
Mask = NDArray[np.bool_]


def pixels_of(task: Task) -> NDArray[np.uint8]:
    [image] = task.prompt[-1].images
    return np.asarray(image.to_pil())


def color_mask(pixels: NDArray[np.uint8], color: str) -> Mask:
    red, green, blue = np.moveaxis(pixels, -1, 0)  # many times faster than a comparison of triples
    r, g, b = COLORS[color]
    mask: Mask = (red == r) & (green == g) & (blue == b)
    return mask


def extent(mask: Mask) -> tuple[int, int]:
    """Return width and height of what is set."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[-1] - columns[0] + 1), int(rows[-1] - rows[0] + 1)


def cells(pixels: NDArray[np.uint8]) -> dict[str, tuple[str, str]]:
    """Return color and shape of the figure in each cell that has one, by the cell's name."""
    figures = {}
    for color in COLORS:
        mask = color_mask(pixels, color)
        for row, column in {*zip(*(np.argwhere(mask) // CELL_PX).T.tolist(), strict=True)}:
            cell = mask[row * CELL_PX : (row + 1) * CELL_PX, column * CELL_PX : (column + 1) * CELL_PX]
            figures[f"{'ABCD'[column]}{row + 1}"] = (color, shape_of(cell))
    return figures


def shape_of(mask: Mask) -> str:
    rows = np.flatnonzero(mask.any(1))
    width, height = extent(mask)
    fill = mask.sum() / (width * height)
    if fill > 0.99:
        return "square"
    if fill > 0.7:
        return "circle"
    return "triangle" if mask[rows[-1]].sum() > 0.9 * width else "diamond"


def digit_in(pixels: NDArray[np.uint8], name: str, color: str) -> str:
    column, row = "ABCD".index(name[0]), int(name[1]) - 1
    cell = pixels[row * CELL_PX : (row + 1) * CELL_PX, column * CELL_PX : (column + 1) * CELL_PX]
    ink = (cell == (0 if color == "yellow" else 255)).all(-1)
    rows, columns = np.flatnonzero(ink.any(1)), np.flatnonzero(ink.any(0))
    squares = ink[rows[0] : rows[-1] + 1 : 4, columns[0] : columns[-1] + 1 : 4]
    text = tuple("".join(".#"[int(square)] for square in line) for line in squares)
    return next(digit for digit, pattern in DIGITS.items() if pattern == text)


def read_answer(task: Task) -> str:
    """Return the answer to a task's question, from its pixels."""
    pixels, kind = pixels_of(task), task.metadata["kind"]
    names = [
        name for name in re.findall(r"[a-z]+", task.question.replace("s are", " are")) if name in (*COLORS, *SHAPES)
    ]
    if kind == "length":
        return str(round(max(extent(color_mask(pixels, names[0]))) / FINE_PX))
    if kind == "area":
        return str(int(color_mask(pixels, names[0]).sum()) // FINE_PX**2)
    if kind == "compare":
        first, second = (extent(color_mask(pixels, name))[0] for name in names)
        return "equal" if first == second else names[first < second]
    figures = cells(pixels)
    if kind == "count":
        return str(sum(names[0] in figure for figure in figures.values()))
    if kind == "locate":
        [cell] = [cell for cell, figure in figures.items() if names[0] in figure]
        return cell
    if kind == "color":
        [color] = [color for color, shape in figures.values() if shape == names[0]]
        return color
    digits = []
    for name in names:
        [cell] = [cell for cell, figure in figures.items() if figure[0] == name]
        digits.append(digit_in(pixels, cell, name))
    return "".join(digits)


@pytest.mark.parametrize("split", ["train", "eval"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_pixels_have_the_answer(kind: str, split: str) -> None:
    for task in Geometry(kinds=[kind], seed=3).split(split)[:20]:
        assert read_answer(task) == task.answer, (task.id, task.question)


def test_shuffled_pictures_are_right_as_often_as_chance() -> None:
    tasks = Geometry(shuffle_pictures=True).split("train")[:240]
    right = [read_answer(task) == task.answer for task in tasks]
    chance = [1 / len(KINDS[kind].answers(KINDS[kind].ask(Random(0)))) for kind in KINDS]
    assert abs(np.mean(right) - np.mean(chance)) < 0.08


def test_shuffled_tasks_have_the_questions_and_answers_of_others() -> None:
    right, shuffled = (Geometry(shuffle_pictures=flag).split("eval")[:40] for flag in (False, True))
    assert [(task.question, task.answer) for task in right] == [(task.question, task.answer) for task in shuffled]
    assert sum(a.prompt[0].images == b.prompt[0].images for a, b in zip(right, shuffled, strict=True)) < 20


@pytest.mark.parametrize("kind", KINDS)
def test_all_answers_are_equally_frequent(kind: str) -> None:
    tasks = Geometry(kinds=[kind]).split("train")
    answers = Counter(tasks.problem(index).answer for index in range(600))
    number = len(KINDS[kind].answers(KINDS[kind].ask(Random(0))))
    bound = 600 / number + 6 * (600 / number) ** 0.5
    assert max(answers.values()) < bound if kind != "compare" else answers["equal"] < bound


def test_equal_options_give_equal_pictures_and_no_picture_is_in_both_splits() -> None:
    train = {task.prompt[0].images[0].digest for task in Geometry().split("train")[:160]}
    assert train == {task.prompt[0].images[0].digest for task in Geometry().split("train")[:160]}
    held_out = [task.prompt[0].images[0].digest for task in Geometry().split("eval")[:160]]
    assert held_out == [task.prompt[0].images[0].digest for task in Geometry(seed=5).split("eval")[:160]]
    assert len(train) == len(set(held_out)) == 160
    assert not train & {*held_out}
    assert not train & {task.prompt[0].images[0].digest for task in Geometry(seed=5).split("train")[:160]}


def play(taskset: Geometry, index: int) -> tuple[float, float]:
    """Return reward and number of zooms of a demonstration."""
    task = taskset.split("train")[index]
    env = GeometryEnv(view_px=32)
    observation, _ = env.reset(seed=0, options={"task": task})
    expert = taskset.demonstrator(task, np.random.default_rng(index))
    while True:
        text = expert.act(observation if isinstance(observation, tuple) else ())
        call = re.fullmatch(
            r'<tool_call>\n\{"name": "zoom", "arguments": \{"box": \[([\d, ]+)\]\}\}\n</tool_call>', text
        )
        calls = (ToolCall("c", "zoom", {"box": [int(edge) for edge in call[1].split(",")]}),) if call else ()
        observation, reward, terminated, _, info = env.step(
            Message("assistant", "" if call else text, tool_calls=calls)
        )
        if terminated:
            assert info["metrics"]["refused_zooms"] == 0
            return reward, info["metrics"]["zooms"]


def test_demonstrations_are_right_and_zoom_on_each_digit() -> None:
    names = [*KINDS]
    for index in range(2 * len(names)):
        assert play(Geometry(), index) == (1.0, {"read": 1, "number": 2}.get(names[index % len(names)], 0))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_make_mistakes(fault: str) -> None:
    taskset = Geometry(kinds=["number"], faults={fault: 1.0})
    played = [play(taskset, index) for index in range(40)]
    assert np.mean([reward for reward, _ in played]) < 0.2
    assert {zooms for _, zooms in played} == ({0} if fault == "guess" else {2})


def test_options_out_of_range_are_refused_by_key() -> None:
    with pytest.raises(UnknownNameError, match=r"tasks.options.kinds"):
        Geometry(kinds=["volume"])
    with pytest.raises(ConfigError, match=r"tasks.options.kinds is empty"):
        Geometry(kinds=[])
    with pytest.raises(ConfigError, match=r"tasks.options.eval_size=0"):
        Geometry(eval_size=0)
    with pytest.raises(UnknownNameError, match="validation"):
        Geometry().split("validation")
