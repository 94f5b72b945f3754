"""One published row ``{data_source, prompt, question, golden_answers, reward_model, extra_info}`` as a question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import ConfigError
from agentrl.data.rows import Row

COLUMNS = ("data_source", "prompt", "question", "golden_answers", "reward_model", "extra_info")
"""What is read. Published files have more, such as the pages that HotpotQA was written from, and those are large."""
MARKER = "Question: "
"""What stands before the question in a published prompt, and nowhere earlier in it."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks."""

    text: str
    """The question."""
    answers: tuple[str, ...]
    """Any of these is right."""
    source: str
    """The data set it is from, such as ``nq``; the file's name where the row does not say."""
    index: int
    """Its number there; in the file where the row does not say."""


def parse_row(row: Row) -> Question:
    """Return the question in a row.

    Raises:
        ConfigError: a key is missing or its value does not fit; the message has file, line or row, key, and the keys there.

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
    """Return the question as the prompt asks it, or where there is no such prompt, as the column ``question`` has it.

    The published prompts put a question mark behind questions whose column has none.
    """
    own, asked = row.values.get("question"), _asked(row)
    if own is None and asked is None:
        raise _fault(row, f"has no 'question', and no message of its 'prompt' with a question behind {MARKER!r}")
    if own is None or (isinstance(own, str) and asked is not None and asked.startswith(own.strip())):
        assert asked is not None
        own = asked
    if not isinstance(own, str) or not own.strip():
        raise _fault(row, f"has {own!r:.80} as its 'question', which must be a text")
    return own.strip()


def _asked(row: Row) -> str | None:
    """Return what the last message of the prompt asks, or None where there is no published prompt."""
    prompt = row.values.get("prompt")
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and len(prompt):
        prompt = prompt[-1].get("content") if isinstance(prompt[-1], Mapping) else None
    if not isinstance(prompt, str):
        return None
    _, marker, question = prompt.partition(MARKER)
    return question.strip() if marker else None


def _answers(row: Row) -> tuple[str, ...]:
    key, found = "reward_model.ground_truth.target", _at(row.values, "reward_model", "ground_truth", "target")
    if found is None:
        key, found = "golden_answers", row.values.get("golden_answers")
    if found is None:
        raise _fault(row, "has neither 'reward_model.ground_truth.target' nor 'golden_answers'")
    answers = [found] if isinstance(found, str) else found
    if not isinstance(answers, Sequence) or not answers or not all(isinstance(one, str) and one for one in answers):
        raise _fault(row, f"has {found!r:.80} as {key!r}, which must be a text or a list of texts, and not empty")
    return tuple(answers)


def _at(values: Mapping[str, Any], *keys: str) -> Any:
    found: Any = values
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _fault(row: Row, what: str) -> ConfigError:
    return ConfigError(f"{row.place} {what}; it has: {', '.join(row.columns) or 'nothing'}")
