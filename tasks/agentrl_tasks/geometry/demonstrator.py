"""A scripted expert that zooms where it must, and answers; with faults for a warm start."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from agentrl import Message

from .questions import KINDS, Question
from .scene import Figure, Scene, cell_of

FAULTS = ("guess", "stray", "misread")
"""Faults of an expert, at most one per episode.

guess: it answers at random, without zooming. stray: its first zoom is on another figure, whose digit it takes. misread: it
zooms as it should and then answers at random. A kind without digits has no zooms, so that all of them are guesses. Descriptions
have no faults.
"""
_BOX_UNITS = 1000


def zoom_call(box: Sequence[int]) -> str:
    """Return the turn that asks for a part of the picture: left, top, right and bottom in thousandths of it."""
    call = json.dumps({"name": "zoom", "arguments": {"box": [*box]}})
    return f"<tool_call>\n{call}\n</tool_call>"


def box_around(scene: Scene, figure: Figure) -> tuple[int, int, int, int]:
    """Return the box of a figure's cell, in thousandths of the picture."""
    column, row = cell_of(scene, figure)
    side = _BOX_UNITS // scene.cells
    return column * side, row * side, (column + 1) * side, (row + 1) * side


class Expert:
    """Knows the scene. It zooms on each figure whose digit the question asks for, and answers.

    Args:
        question: what is asked.
        scene: what the picture shows.
        answer: the right answer.
        fault: one of `FAULTS`, or None.
        rng: draws what a fault needs.
    """

    def __init__(
        self, question: Question, scene: Scene, answer: str, fault: str | None, rng: np.random.Generator
    ) -> None:
        figures = [
            next(figure for figure in scene.figures if figure.digit and figure.color == color)
            for color in question.subjects
            if any(figure.digit for figure in scene.figures)
        ]
        others = [figure for figure in scene.figures if figure not in figures]
        if fault == "stray" and figures and others:
            figures[0] = others[int(rng.integers(len(others)))]
            answer = "".join(figure.digit for figure in figures)
        elif fault is not None and question.kind in KINDS:
            answers = KINDS[question.kind].answers(question)
            answer = answers[int(rng.integers(len(answers)))]
        if fault == "guess":
            figures = []
        self._turns = [*(zoom_call(box_around(scene, figure)) for figure in figures), answer]

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the next turn: a zoom, or the answer."""
        return self._turns.pop(0)
