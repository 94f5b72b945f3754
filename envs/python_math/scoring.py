r"""Whether an answer is right: as text, as a number, else as mathematics."""

from __future__ import annotations

import re
from collections.abc import Iterable

from agentrl.rewards import last_boxed, last_number, same_number
from agentrl.rewards.math_equivalence import equivalent

_NUMERAL = re.compile(r"\s*\$?\s*[-+−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?\s*\$?\s*")
"""A bare number, of which nothing but its value can be meant."""


def same_answer(answer: str, accepted: Iterable[str]) -> bool:
    r"""Return whether ``answer``, the inside of a ``\boxed{…}``, means the same as one of the ``accepted`` ones.

    Equal texts and bare numbers (``1,234`` is ``1234.0``) are decided here, everything else by math-verify in a process
    of its own. An accepted answer may itself be boxed. May block for seconds: mathematics can be hard.

    Raises:
        ValueError: an accepted answer cannot be read.

    """
    return any(_same(answer, last_boxed(right) or right) for right in accepted)


def _same(answer: str, right: str) -> bool:
    if answer.split() == right.split():
        return True
    if _NUMERAL.fullmatch(answer) and _NUMERAL.fullmatch(right):
        said, wanted = last_number(answer), last_number(right)
        if said is not None and wanted is not None:  # numbers of hundreds of digits have no such reading
            return same_number(said, wanted)
        return _digits(answer) == _digits(right)
    return equivalent(answer, right)


def _digits(text: str) -> str:
    return re.sub(r"[\s,$+]", "", text).replace("−", "-")
