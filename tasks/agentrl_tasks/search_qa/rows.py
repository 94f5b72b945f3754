"""Parsing of published rows ``{data_source, prompt, question, golden_answers, reward_model, extra_info}`` into questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import ConfigError
from agentrl.data.rows import Row

COLUMNS = ("data_source", "prompt", "question", "golden_answers", "reward_model", "extra_info")
"""Columns to read. Published files have more, such as the pages of HotpotQA, which are large."""
MARKER = "Question: "
"""Precedes the question in a published prompt, and does not occur earlier in it."""


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a row."""

    text: str
    """Text of the question."""
    answers: tuple[str, ...]
    """Accepted answers."""
    source: str
    """The data set, such as ``nq``; the file's name if the row has none."""
    index: int
    """Its index in the data set; the row's number if the row has none."""


def parse_row(row: Row) -> Question:
    """Return the question in a row.

    Raises:
        ConfigError: a key is missing or its value is invalid; the message has file, line or row, key, and the keys there.
    """
    extra = row.values.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return Question(
        text=_question(row),
        answers=_answers(row),
        source=str(row.values.get("data_source") or row.path.stem),
        index=index if isinstance(index, int) else row.number,
    )


def _question(row: Row) -> str:
    """Return the question in the prompt if it agrees with the column ``question``, otherwise that column.

    Published prompts add a question mark to questions whose column has none.
    """
    column, prompted = row.values.get("question"), _prompt_question(row)
    if column is None and prompted is None:
        raise _fault(row, f"has no 'question', and no message of its 'prompt' with a question after {MARKER!r}")
    if column is None or (isinstance(column, str) and prompted is not None and prompted.startswith(column.strip())):
        assert prompted is not None
        column = prompted
    if not isinstance(column, str) or not column.strip():
        raise _fault(row, f"has {column!r:.80} as its 'question', which must be a text")
    return column.strip()


def _prompt_question(row: Row) -> str | None:
    """Return the question in the last message of the prompt, or None if it is not a published prompt."""
    prompt = row.values.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt):
        prompt = prompt[-1].get("content") if isinstance(prompt[-1], Mapping) else None
    if not isinstance(prompt, str):
        return None
    _, marker, question = prompt.partition(MARKER)
    return question.strip() if marker else None


def _answers(row: Row) -> tuple[str, ...]:
    key, target = "reward_model.ground_truth.target", _at(row.values, "reward_model", "ground_truth", "target")
    if target is None:
        key, target = "golden_answers", row.values.get("golden_answers")
    if target is None:
        raise _fault(row, "has neither 'reward_model.ground_truth.target' nor 'golden_answers'")
    answers = [target] if isinstance(target, str) else target
    if (
        not isinstance(answers, Sequence)
        or not answers
        or not all(isinstance(answer, str) and answer for answer in answers)
    ):
        raise _fault(row, f"has {target!r:.80} as {key!r}, which must be a text or a list of texts, and not empty")
    return tuple(answers)


def _at(values: Mapping[str, Any], *keys: str) -> Any:
    value: Any = values
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _fault(row: Row, problem: str) -> ConfigError:
    return ConfigError(f"{row.location} {problem}; it has: {', '.join(row.columns) or 'nothing'}")
