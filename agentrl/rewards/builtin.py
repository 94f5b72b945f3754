"""The reward functions that come with agentrl: entry points ``agentrl.rewards``, like those of other packages.

All of them compare the policy's last turn (`Sample.final`) with ``sample.label``; text of tools and environments never
counts. Of that turn they take the text after ``</think>``, and in that the content of the last ``<answer>`` tags, if there
are any (`answer_text`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import isfinite

from agentrl.rewards import answers, math_equivalence
from agentrl.rewards.extraction import answer_text, last_boxed
from agentrl.rewards.numbers import last_number, same_number, whole_number
from agentrl.rewards.sample import Sample

_log = logging.getLogger(__name__)


def exact_match(sample: Sample) -> float:
    """Return 1.0 if the answer equals the label, or one of several labels; see `agentrl.rewards.normalize`."""
    return answers.exact_match(answer_text(sample.final), _texts(sample))


def f1(sample: Sample) -> float:
    """Return the F1 of the answer's words with the label's; the best of several labels."""
    return answers.f1(answer_text(sample.final), _texts(sample))


def squad_exact_match(sample: Sample) -> float:
    """Return 1.0 if the answer equals the label, or one of several labels, after SQuAD's normalisation."""
    return answers.exact_match(answer_text(sample.final), _squad_texts(sample), answers.squad_normalize)


def squad_f1(sample: Sample) -> float:
    """Return the F1 of the answer's words with the label's after SQuAD's normalisation; the best of several labels."""
    return answers.f1(answer_text(sample.final), _squad_texts(sample), answers.squad_normalize)


def numeric(sample: Sample) -> float:
    r"""Return 1.0 if the last number of the answer equals the last one of the label, whatever text is around them.

    Different notations are equal: ``1,234.50`` is ``1234.5``, ``\\frac{1}{2}`` is ``0.5``, and ``50%`` is ``0.5``.
    """
    rights = [_number(text, sample) for text in _texts(sample)]
    answer = last_number(answer_text(sample.final))
    return float(answer is not None and any(same_number(answer, right) for right in rights))


def math(sample: Sample) -> float:
    r"""Return 1.0 if the last ``\\boxed{…}`` of the answer is equivalent to the label (boxed or not)."""
    labels = [last_boxed(text) or text for text in _texts(sample)]
    boxed = last_boxed(answer_text(sample.final))
    if not boxed:
        return 0.0
    return float(any(math_equivalence.equivalent(boxed, label) for label in labels))


def _texts(sample: Sample) -> list[str]:
    """Return the accepted answers."""
    check_label(sample.label, sample.prompt_id)
    return [str(answer) for answer in (sample.label if isinstance(sample.label, list | tuple) else [sample.label])]


def check_label(label: object, prompt_id: str) -> None:
    """Check that a label is one that the functions of this module compare with.

    Raises:
        ValueError: it is not; the message has it.
    """
    labels: Sequence[object] = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(_is_answer(answer) for answer in labels):
        names = f", such as data.label_key=….{next(iter(label))}" if isinstance(label, Mapping) and label else ""
        raise ValueError(
            f"the label of {prompt_id} is {label!r:.200}; this reward needs a text, a number, or a list of them "
            f"(data.label_key names the column{names})"
        )


def _is_answer(value: object) -> bool:
    is_finite = not isinstance(value, float) or isfinite(value)
    return (
        isinstance(value, str | int | float) and not isinstance(value, bool) and is_finite and bool(str(value).strip())
    )


def _squad_texts(sample: Sample) -> list[str]:
    texts = _texts(sample)
    for text in texts:
        if whole_number(text.strip()) is not None:
            _warn_once("joins different numbers (3.5 and 35, -5 and 5), and there are labels that are numbers")
        elif not answers.squad_normalize(text):
            _warn_once("leaves nothing of some labels, such as 'A', which no answer matches then")
    return texts


@cache
def _warn_once(fault: str) -> None:
    _log.warning("SQuAD's normalisation %s: set reward.function=exact_match, or numeric", fault)


def _number(text: str, sample: Sample) -> Fraction:
    number = last_number(text)
    if number is None:
        raise ValueError(f"there is no number in {text!r}, the label of {sample.prompt_id}")
    return number
