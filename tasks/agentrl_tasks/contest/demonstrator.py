"""A scripted expert that submits a problem's program, or one with a mistake."""

from __future__ import annotations

from agentrl import Message

from .problem import Problem

SLIPS = ("condition", "forgotten", "change", "answer", "text", "bracket", "unfenced")
"""Mistakes: another condition, no condition, another transformation, another output, numbers left as text, a missing
bracket, and a program without the fences of a code block."""


def submission(program: str, *, fenced: bool = True) -> str:
    """Return the turn of a policy that submits ``program``."""
    return f"```python\n{program}```" if fenced else program


class Programmer:
    """Solves a problem in one turn.

    Args:
        problem: what to solve.
        slip: one of `SLIPS`, or None for the reference solution. If the problem does not have it, another.
    """

    def __init__(self, problem: Problem, slip: str | None) -> None:
        self._text = submission(problem.program, fenced=slip != "unfenced")
        if slip is not None and slip != "unfenced":
            names = [slip, *problem.slips]
            wrong = next((problem.slips[name] for name in names if name in problem.slips), None)
            self._text = submission(problem.program, fenced=False) if wrong is None else submission(wrong)

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the turn that submits the program."""
        return self._text
