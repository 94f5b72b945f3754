"""The reward functions that come with agentrl: entry points ``agentrl.rewards``, like those of other packages.

All of them compare the policy's last turn (`Sample.final`) with ``sample.label``; text of tools and environments never
counts. Of that turn they take the text after ``</think>``, and in that the content of the last ``<answer>`` tags, if there
are any (`answer_text`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.rewards import answers, math_equivalence
from agentrl.rewards.numbers import Number, last_number, same_number
from agentrl.rewards.sample import Sample


def exact_match(sample: Sample) -> float:
    """Return 1.0 if the answer equals the label, or one of several labels, after SQuAD's normalisation."""
    return answers.exact_match(answers.answer_text(sample.final), _texts(sample))


def f1(sample: Sample) -> float:
    """Return the F1 of the answer's words with the label's; the best of several labels."""
    return answers.f1(answers.answer_text(sample.final), _texts(sample))


def numeric(sample: Sample) -> float:
    r"""Return 1.0 if the last number of the answer equals the last one of the label.

    Different notations are equal: ``1,234.50`` is ``1234.5``, ``\\frac{1}{2}`` is ``0.5``, and ``50%`` is ``0.5`` or ``50``.
    """
    rights = [_number(text, sample) for text in _texts(sample)]
    answer = last_number(answers.answer_text(sample.final))
    return float(answer is not None and any(same_number(answer, right) for right in rights))


def math(sample: Sample) -> float:
    r"""Return 1.0 if the last ``\\boxed{…}`` of the answer is equivalent to the label (boxed or not)."""
    labels = [answers.last_boxed(text) or text for text in _texts(sample)]
    boxed = answers.last_boxed(answers.answer_text(sample.final))
    if not boxed:
        return 0.0
    return float(any(math_equivalence.equivalent(boxed, label) for label in labels))


def _texts(sample: Sample) -> list[str]:
    """Return the accepted answers."""
    label = sample.label
    labels: Sequence[Any] = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(_is_answer(answer) for answer in labels):
        raise ValueError(
            f"the label of {sample.prompt_id} is {label!r}; this reward needs a text, a number, or a list of them "
            "(data.label_key names the column)"
        )
    return [str(answer) for answer in labels]


def _is_answer(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and bool(str(value).strip())


def _number(text: str, sample: Sample) -> Number:
    number = last_number(text)
    if number is None:
        raise ValueError(f"there is no number in {text!r}, the label of {sample.prompt_id}")
    return number
