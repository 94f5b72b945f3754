"""The verdict on a program's run of one test: comparison of its output with the expected one. Nothing runs here."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from agentrl import ToolStatus
from agentrl.sandbox.base import Outcome

Compare = Literal["tokens", "lines"]
"""``tokens``: the words between white space; ``lines``: whole lines, white space at their ends and blank lines at the
end of the output left out."""

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 64


class Verdict(StrEnum):
    """How one test ended."""

    ACCEPTED = "accepted"
    """It ended with exit status 0 and printed the expected output."""
    WRONG_ANSWER = "wrong_answer"
    """It ended with exit status 0 and printed another output."""
    RUNTIME_ERROR = "runtime_error"
    """It ended with another exit status, or by a signal."""
    TIME_LIMIT = "time_limit"
    """It used up its time."""
    MEMORY_LIMIT = "memory_limit"
    """It used more memory than its sandbox has."""
    OUTPUT_LIMIT = "output_limit"
    """It printed more than it may."""
    NOT_RUN = "not_run"
    """An earlier test failed, and one failure was enough."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How an output is compared with the expected one."""

    compare: Compare = "tokens"
    """Words or lines."""
    tolerance: float | None = None
    """With ``compare="tokens"``: numbers may differ by this much, times the expected number if that is greater than 1; None
    requires the same text."""

    def fits(self, printed: str, expected: str) -> bool:
        """Return whether ``printed`` matches ``expected``."""
        if self.compare == "lines":
            return _lines(printed) == _lines(expected)
        words, expected_words = printed.split(), expected.split()
        return len(words) == len(expected_words) and all(map(self._same, words, expected_words))

    def _same(self, word: str, expected_word: str) -> bool:
        if word == expected_word:
            return True
        if self.tolerance is None or not (_is_number(word) and _is_number(expected_word)):
            return False
        number, right = float(word), float(expected_word)
        # 1e999 reads as infinity, from which everything and nothing is within a tolerance.
        if not (math.isfinite(number) and math.isfinite(right)):
            return False
        return abs(number - right) <= self.tolerance * max(1.0, abs(right))


def _lines(text: str) -> list[str]:
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _is_number(word: str) -> bool:
    return len(word) <= _LONGEST_NUMBER and _NUMBER.fullmatch(word) is not None


_ENDED = {
    ToolStatus.ERROR: Verdict.RUNTIME_ERROR,
    ToolStatus.KILLED: Verdict.RUNTIME_ERROR,
    ToolStatus.TIMEOUT: Verdict.TIME_LIMIT,
    ToolStatus.OUT_OF_MEMORY: Verdict.MEMORY_LIMIT,
    ToolStatus.OUTPUT_CUT: Verdict.OUTPUT_LIMIT,
}


def judge_outcome(outcome: Outcome, expected: str, rule: Rule) -> Verdict:
    """Return the verdict on one run. The output counts only if the run ended by itself with exit status 0."""
    if outcome.status is not ToolStatus.OK:
        return _ENDED[outcome.status]
    return Verdict.ACCEPTED if rule.fits(outcome.stdout, expected) else Verdict.WRONG_ANSWER
