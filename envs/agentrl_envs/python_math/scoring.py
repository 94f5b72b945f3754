r"""Comparison of answers: as text, as numbers, otherwise as mathematical expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable

from agentrl.rewards import last_boxed, last_number, same_number
from agentrl.rewards.math_equivalence import equivalent

_NUMERAL = re.compile(r"[-+−]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?")


def same_answer(answer: str, accepted: Iterable[str]) -> bool:
    r"""Return whether ``answer``, the content of a ``\boxed{…}``, is equivalent to one of the ``accepted`` ones.

    Equal texts and plain numbers (``1,234`` is ``1234.0``, and ``20%`` is ``20``) are compared here, everything else by
    math-verify in a worker process. An accepted answer may itself be boxed. May block for seconds.

    Raises:
        ValueError: an accepted answer cannot be parsed.
    """
    return any(_same(answer, last_boxed(right) or right) for right in accepted)


def is_numeral(text: str) -> bool:
    """Return whether a text is a plain number, white space and dollar signs around it aside."""
    inner = text.strip().removeprefix("$").removesuffix("$").strip()
    return _NUMERAL.fullmatch(inner) is not None


def _same(answer: str, right: str) -> bool:
    if answer.split() == right.split():
        return True
    answer, right = _without_percent(answer), _without_percent(right)
    if is_numeral(answer) and is_numeral(right):
        number, expected = last_number(answer), last_number(right)
        if number is not None and expected is not None:  # None for numbers of hundreds of digits
            return same_number(number, expected)
        return _digits(answer) == _digits(right)
    return equivalent(answer, right)


def _without_percent(text: str) -> str:
    """Return a number without its percent sign, which is a unit of the question, as a dollar sign is; other texts unchanged."""
    number = text.strip().removesuffix("$").rstrip().removesuffix("%").removesuffix("\\")
    return number if is_numeral(number.removeprefix("$")) else text


def _digits(text: str) -> str:
    return re.sub(r"[\s,$+]", "", text).replace("−", "-")
