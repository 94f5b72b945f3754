"""Parsing of published rows into problems: DAPO-Math-17k and GSM8K."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl import ConfigError
from agentrl.data.rows import Row

COLUMNS = ("prompt", "question", "answer", "reward_model", "label", "data_source", "extra_info")
"""Columns to read of parquet files."""
MARK = "####"
"""Precedes the answer at the end of a solution of GSM8K."""

_DAPO_WRAPPER = (
    "where $Answer is the answer to the problem.",
    'Remember to put your answer on its own line after "Answer:".',
)
"""End of the instruction before a published DAPO problem, and begin of that after it. They do not request a box."""


@dataclass(frozen=True, slots=True)
class Published:
    """The problem of a row."""

    question: str
    """Text of the problem, without the published instructions around it."""
    answer: str
    """The right answer."""
    source: str
    """The data set; the file's name if the row has none."""
    index: int | str
    """Its index in the data set; the row's number if the row has none."""


def dapo(row: Row) -> Published:
    """Return the problem in a row ``{prompt, reward_model: {ground_truth}, data_source, extra_info}``, or in a row
    ``{prompt, label}``, the format of the same problems in JSONL.

    Raises:
        ConfigError: a key is missing or its value is invalid; the message has file, line or row, key, and the keys there.
    """
    prompt = row.values.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt:
        prompt = prompt[-1].get("content") if isinstance(prompt[-1], Mapping) else None
    question = _text(row, "prompt", prompt, "a text, or a list of messages with one at the end")
    key, answer = "label", row.values.get("label")
    if answer is None:
        key, model = "reward_model.ground_truth", row.values.get("reward_model")
        answer = model.get("ground_truth") if isinstance(model, Mapping) else None
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    extra = row.values.get("extra_info")
    index = extra.get("index") if isinstance(extra, Mapping) else None
    return Published(
        _strip_wrapper(question),
        _text(row, key, answer, "a text or a number"),
        str(row.values.get("data_source") or row.path.stem),
        index if isinstance(index, int | str) else row.number,
    )


def gsm8k(row: Row) -> Published:
    """Return the problem in a row ``{question, answer}``, whose answer ends with ``#### 42``.

    Raises:
        ConfigError: a key is missing or its value is invalid; the message has file, line or row, key, and the keys there.
    """
    question = _text(row, "question", row.values.get("question"), "a text")
    solution = _text(row, "answer", row.values.get("answer"), "a text")
    _, mark, answer = solution.rpartition(MARK)
    if not mark or not answer.strip():
        raise _fault(row, f"has no {MARK!r} with the answer after it in its 'answer': {solution[-80:]!r}")
    source = str(row.values.get("data_source") or row.path.stem)
    return Published(question, answer.strip().replace(",", ""), source, row.number)


FORMATS: Mapping[str, Callable[[Row], Published]] = {"dapo": dapo, "gsm8k": gsm8k}
"""Parsers by ``tasks.options.format``."""


def detect_format(row: Row) -> str:
    """Return the format of a row, by its columns.

    Raises:
        ConfigError: it has the columns of none.
    """
    if "prompt" in row.columns and ("reward_model" in row.columns or "label" in row.columns):
        return "dapo"
    if "question" in row.columns and "answer" in row.columns:
        return "gsm8k"
    raise _fault(
        row, "is neither a row of dapo ('prompt', 'reward_model' or 'label') nor of gsm8k ('question', 'answer')"
    )


def _strip_wrapper(prompt: str) -> str:
    instruction_end, reminder = _DAPO_WRAPPER
    _, wrapper, unwrapped = prompt.partition(instruction_end)
    inner, end, _ = (unwrapped if wrapper else prompt).rpartition(reminder)
    return (inner if end else unwrapped if wrapper else prompt).strip() or prompt


def _text(row: Row, key: str, value: Any, expected: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _fault(row, f"has {value!r:.80} as {key!r}, which must be {expected}, and not empty")
    return value.strip()


def _fault(row: Row, problem: str) -> ConfigError:
    return ConfigError(f"{row.location} {problem}; it has: {', '.join(row.columns) or 'nothing'}")
