"""The reward functions that come with agentrl: entry points ``agentrl.rewards``, like those of other packages.

All of them score the policy's last turn (`Sample.final`); text of tools and environments never counts. Of that turn they take
the text after ``</think>``, and in that the content of the last ``<answer>`` tags, if there are any (`answer_text`). Most compare
it with ``sample.label``. An empty answer has the lowest reward.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import isfinite
from typing import TypeVar

from agentrl.core.errors import ToolFailure
from agentrl.core.types import THINK_END, ToolStatus
from agentrl.rewards import answers, math_equivalence
from agentrl.rewards.choices import named_option, option_texts, right_option
from agentrl.rewards.constraints import read_constraints
from agentrl.rewards.extraction import answer_text, last_boxed
from agentrl.rewards.numbers import last_number, same_number, whole_number
from agentrl.rewards.programs import is_encodable, program_in, read_tests
from agentrl.rewards.sample import Sample

_log = logging.getLogger(__name__)

T = TypeVar("T")

_DAPO_TAIL = 300
"""Last characters of a turn in which ``dapo`` looks for the answer, as verl's does."""
_DAPO_ANSWER = re.compile(r"(?i)\banswer\s{0,3}:\s{0,3}([^\n]+)")
JUDGE = "judge"
"""The tool that runs programs on hidden tests."""


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


def dapo(sample: Sample) -> dict[str, float]:
    r"""Return 1.0 if the last ``Answer: …`` in the end of the turn is equivalent to the label, else -1.0, as ``score``.

    The rule and its values are those of DAPO (arXiv:2503.14476, 2.4): the last line ``Answer: …`` of the last 300 characters, in
    ``$`` or ``\\boxed{}`` or not. ``accuracy`` is 1.0 or 0.0.
    """
    texts = _texts(sample)
    lines = _DAPO_ANSWER.findall(sample.final[-_DAPO_TAIL:])
    answer = lines[-1].strip().strip("$*").strip() if lines else ""
    answer = last_boxed(answer) or answer
    right = bool(answer) and any(math_equivalence.equivalent(answer, last_boxed(text) or text) for text in texts)
    return {"score": 1.0 if right else -1.0, "accuracy": float(right)}


def deepscaler(sample: Sample) -> float:
    r"""Return 1.0 if the turn has closed its reasoning (``</think>``) and then ``\\boxed{…}`` is equivalent to the label.

    The rule of DeepScaleR: without ``</think>`` the reward is 0. Otherwise it is that of `math`.
    """
    return math(sample) if THINK_END in sample.final else math(sample) * 0.0


def gpqa(sample: Sample) -> float:
    r"""Return 1.0 if the answer names the right option of a multiple-choice question, and no other.

    The label is its letter, its number from 0, or its text; ``metadata.choices`` lists the options. The answer is the last
    ``\\boxed{C}``, without one the last ``answer is (C)`` or ``Answer: C``, without that a last line that is a letter, or the
    text of an option alone.
    """
    texts = option_texts(sample.metadata)
    right = _right_option(sample.label, sample.metadata, sample.prompt_id)
    answer = answer_text(sample.final)
    option = named_option(answer, len(texts)) if texts else named_option(answer)
    if option is None and texts and answer.strip():
        same = [index for index, text in enumerate(texts) if answers.normalize(text) == answers.normalize(answer)]
        option = right_option(same[0], texts) if len(same) == 1 else None
    return float(option == right)


def ifbench(sample: Sample) -> dict[str, float]:
    """Return 1.0 as ``score`` if the answer follows all of the task's constraints, else 0.0; ``followed`` is their share.

    ``metadata.instruction_id_list`` and ``metadata.kwargs``, or the same in the label, name constraints as IFEval
    (arXiv:2311.07911) and IFBench (arXiv:2507.02833) do; see `agentrl.rewards.constraints`.
    """
    constraints = _read(lambda: read_constraints(sample.metadata, sample.label), sample.prompt_id)
    followed = [constraint.is_followed(answer_text(sample.final)) for constraint in constraints]
    return {"score": float(all(followed)), "followed": sum(followed) / len(followed)}


async def code(sample: Sample) -> dict[str, float]:
    """Return 1.0 as ``score`` if the last block of Python passes all hidden tests, else 0.0; ``passed`` is the share of them.

    The tool ``judge`` runs it, in sandboxes in which no expected output is. The label has the tests: ``{"inputs": […], "outputs":
    […]}``, or a list of ``{"input": …, "output": …}``, also as JSON text.

    Raises:
        ToolFailure: the tool returned no verdicts.
    """
    tests = _read(lambda: read_tests(sample.label), sample.prompt_id)
    program = program_in(sample.final)
    if program is None or not is_encodable(program):
        return {"score": 0.0, "passed": 0.0}
    result = await sample.call_tool(JUDGE, {"program": program, **tests.arguments()})
    verdicts = result.data.get("verdicts") if isinstance(result.data, Mapping) else None
    if result.status is not ToolStatus.OK or not isinstance(verdicts, list) or len(verdicts) != len(tests.inputs):
        raise ToolFailure(f"the tool {JUDGE!r} returned no verdicts: {result.status.value}: {result.content[:200]}")
    passed = verdicts.count("accepted") / len(verdicts)
    return {"score": float(passed == 1.0), "passed": passed}


code.tool_names = (JUDGE,)  # type: ignore[attr-defined]


def environment(sample: Sample) -> float:
    """Return the environment's own reward, for a sum with other rewards (``reward.functions``)."""
    return sample.rollout.reward


WITHOUT_LABEL = (ifbench, environment)
"""Functions that need no label."""


def _read(read: Callable[[], T], prompt_id: str) -> T:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"the task {prompt_id}: {error}") from None


def _right_option(label: object, metadata: Mapping[str, object], prompt_id: str) -> str:
    try:
        return right_option(label, option_texts(metadata))
    except ValueError as error:
        raise ValueError(f"the label of {prompt_id}: {error} (data.label_key names its column)") from None


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


def check_task(function: Callable[..., object], label: object, metadata: Mapping[str, object], prompt_id: str) -> None:
    """Check that a function of this module can score answers to a task.

    Raises:
        ValueError: its label or its metadata do not fit; the message has them.
    """
    if function is ifbench:
        _read(lambda: read_constraints(metadata, label), prompt_id)
    elif function is code:
        _read(lambda: read_tests(label), prompt_id)
    elif function is gpqa:
        _right_option(label, metadata, prompt_id)
    elif function is not environment:
        check_label(label, prompt_id)
