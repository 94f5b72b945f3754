"""The option that an answer to a multiple-choice question names. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase

from agentrl.rewards.answers import normalize
from agentrl.rewards.extraction import last_boxed

LETTERS = 10
"""Options of a question whose task does not list them: A to J."""
_LETTER = r"\(?\[?\**([A-Z])\**\]?\)?"
_NAMED = re.compile(
    r"(?i:\b(?:answer|option|choice)\b(?:\s{1,3}(?:is|would be))?\s{0,3}[:=]?\s{0,3}\**\s{0,3}(?:option\s{1,3})?)"
    rf"{_LETTER}(?![\w'’])"
)
"""``the answer is (C)``, ``Answer: C``, ``option C``. Letters are capitals, so that the article is no option."""
_FURTHER = re.compile(r"\s{0,3}(?:,|/|&|;|(?i:\bor\b|\band\b))\s{0,3}\(?\**[A-Z]\**\)?(?![\w'’])")
"""What names a second option next to the first."""
_LINE = re.compile(rf"\s{{0,3}}{_LETTER}(?:[.):]\s.*|[.)]?\s{{0,3}})")
"""A line that is a letter, perhaps with the option's text."""
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\s?\{([^{}]*)\}")


def named_option(answer: str, options: int = LETTERS) -> str | None:
    r"""Return the letter of the option that an answer chooses, or None if it chooses none, or several.

    The last ``\boxed{C}`` counts, without one the last ``answer is C`` or ``Answer: C``, without that a last line that is a
    letter.

    Args:
        answer: the text.
        options: number of options; letters after them name none.
    """
    boxed = last_boxed(answer)
    if boxed is not None:
        return _letter_alone(_TEXT.sub(r"\1", boxed), options)
    named = list(_NAMED.finditer(answer))
    if named:
        last = named[-1]
        return None if _FURTHER.match(answer, last.end()) else _in_range(last[1], options)
    lines = [line for line in answer.splitlines() if line.strip()]
    return _letter_alone(lines[-1], options) if lines else None


def _letter_alone(text: str, options: int) -> str | None:
    match = _LINE.fullmatch(text)
    return _in_range(match[1], options) if match and not _FURTHER.match(text, match.end(1)) else None


def _in_range(letter: str, options: int) -> str | None:
    return letter if letter in ascii_uppercase[:options] else None


def option_texts(metadata: Mapping[str, object]) -> Sequence[str]:
    """Return the options in a task's metadata (``choices``): a list, or texts by letter; empty if it has none."""
    choices = metadata.get("choices")
    if isinstance(choices, Mapping):
        choices = [choices[letter] for letter in sorted(choices)]
    return [str(choice) for choice in choices] if isinstance(choices, list | tuple) else []


def right_option(label: object, texts: Sequence[str]) -> str:
    """Return the letter of the right option.

    Args:
        label: its letter, its number from 0, or its text.
        texts: the options, as far as the task lists them.

    Raises:
        ValueError: the label is none of them.
    """
    options = len(texts) or LETTERS
    letters = ascii_uppercase[:options]
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < options:
        return letters[label]
    if isinstance(label, str):
        letter = label.strip().strip("()[].").upper()
        if len(letter) == 1 and letter in letters:
            return letter
        same = [index for index, text in enumerate(texts) if normalize(text) == normalize(label)]
        if len(same) == 1:
            return letters[same[0]]
    listed = f" of the {options} options in metadata.choices" if texts else ", and the metadata lists no choices"
    raise ValueError(f"{label!r:.100} is no letter, number or text{listed}")
