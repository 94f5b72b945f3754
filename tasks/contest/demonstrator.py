"""A scripted expert that writes a problem's program, or one with a slip in it."""

from __future__ import annotations

from agentrl.core.types import Message

from .problem import Problem

SLIPS = ("condition", "forgotten", "change", "answer", "text", "bracket", "unfenced")
"""What may go wrong: another condition, none at all, another change, another answer, numbers left as text, a bracket that
is missing, and a program that is not handed in as one."""


def handed_in(program: str, *, fenced: bool = True) -> str:
    """Return what a policy says that hands in ``program``."""
    return f"```python\n{program}```" if fenced else program


class Programmer:
    """Solves a problem in one turn.

    Args:
        problem: what to solve.
        slip: one of `SLIPS`, or None for the reference solution. Where the problem cannot have it, another.
    """

    def __init__(self, problem: Problem, slip: str | None) -> None:
        self.said = handed_in(problem.program, fenced=slip != "unfenced")
        if slip is not None and slip != "unfenced":
            names = [slip, *problem.slips]
            wrong = next((problem.slips[name] for name in names if name in problem.slips), None)
            self.said = handed_in(problem.program, fenced=False) if wrong is None else handed_in(wrong)

    def act(self, observation: tuple[Message, ...]) -> str:
        """Hand in the program."""
        return self.said
