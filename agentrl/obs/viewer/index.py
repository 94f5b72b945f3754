"""Index of a page, which is loaded at once: a summary of each rollout, stored by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agentrl.core.types import Provenance, Rollout
from agentrl.obs.viewer.pack import runs
from agentrl.obs.viewer.run_files import Entry

EXCERPT = 140
"""Most characters of the excerpts of a rollout's last action and of its prompt."""

BARS = 96
"""Most segments in the bar of a rollout in the list."""


class Index:
    """Collects the list's columns: lists of equal length with one item per rollout."""

    def __init__(self) -> None:
        self._columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._metrics: dict[str, list[float | None]] = {}
        self._groups: dict[tuple[int, str], int] = {}
        self._prompts: list[str] = []
        self._names: dict[str, dict[str, int]] = {"stop": {}, "failure": {}, "episode": {}}

    def __len__(self) -> int:
        return len(self._columns["id"])

    def add(self, entry: Entry, packed: int) -> None:
        """Add a rollout whose packed tokens have ``packed`` characters in the page."""
        rollout = entry.rollout
        group = self._groups.setdefault((entry.step, rollout.prompt_id), len(self._groups))
        if group == len(self._prompts):
            self._prompts.append(rollout.prompt)
        for key in rollout.metrics:
            self._metrics.setdefault(key, [None] * len(self))
        for key, values in self._metrics.items():
            values.append(rollout.metrics.get(key))
        failure = rollout.failure
        values_of_row = {
            "id": rollout.rollout_id,
            "group": group,
            "reward": rollout.reward,
            "advantage": entry.advantage,
            "stop": self._number("stop", rollout.stop_reason.value),
            "failure": -1 if failure is None else self._number("failure", failure.kind.value),
            "dropped": int(rollout.dropped),
            "tokens": sum(len(row.token_ids) for row in rollout.rows),
            "sampled": rollout.sampled_tokens,
            "turns": len(rollout.turns),
            "seconds": round(rollout.seconds, 3),
            "logprob": _mean_logprob(rollout),
            "excerpt": _last_words(rollout),
            "bar": _bar(rollout),
            "packed": packed,
            "episode": self._number("episode", f"{entry.step}/{rollout.episode}") if rollout.seats else -1,
            "seat": rollout.seat,
            "opponent": rollout.opponent,
        }
        for name, value in values_of_row.items():
            self._columns[name].append(value)

    def _number(self, kind: str, name: str) -> int:
        return self._names[kind].setdefault(name, len(self._names[kind]))

    def data(self) -> dict[str, Any]:
        """Return the index as JSON-able data."""
        return {
            "rollouts": self._columns,
            "metrics": self._metrics,
            "groups": [
                {"step": step, "prompt": prompt_id, "excerpt": excerpt}
                for (step, prompt_id), excerpt in zip(self._groups, differences(self._prompts), strict=True)
            ],
            "stops": list(self._names["stop"]),
            "failures": list(self._names["failure"]),
        }


_COLUMNS = (
    "id", "group", "reward", "advantage", "stop", "failure", "dropped", "tokens", "sampled", "turns", "seconds",
    "logprob", "excerpt", "bar", "packed", "episode", "seat", "opponent",
)  # fmt: skip


def differences(texts: Sequence[str]) -> list[str]:
    """Return each text on one line without the words that are common to the start and the end of all texts.

    The instructions around a question are the same in a whole run; what identifies a prompt is its question.
    """
    distinct = sorted(set(texts))
    start = end = 0
    if len(distinct) > 1:
        start = _whole_words(_common(distinct))
        end = _whole_words(_common([text[start:][::-1] for text in distinct]))
    return [" ".join(text[start : len(text) - end].split())[:EXCERPT] for text in texts]


def _common(texts: Sequence[str]) -> str:
    """Return the longest common prefix: that of the first and the last text in order."""
    first, last = min(texts), max(texts)
    size = next(
        (n for n, pair in enumerate(zip(first, last, strict=False)) if pair[0] != pair[1]), min(map(len, (first, last)))
    )
    return first[:size]


def _whole_words(common: str) -> int:
    """Return the length of the whole words in a common prefix: up to its last white space."""
    return max((index + 1 for index, character in enumerate(common) if character.isspace()), default=0)


def _last_words(rollout: Rollout) -> str:
    if rollout.failure is not None:
        return f"{rollout.failure.error}: {rollout.failure.message}"[:EXCERPT]
    for turn in reversed(rollout.turns):
        words = " ".join(turn.action.split())
        if words:
            return words if len(words) <= EXCERPT else "…" + words[1 - EXCERPT :]
    return ""


def _mean_logprob(rollout: Rollout) -> float | None:
    by_row = [row.logprobs[row.provenance == Provenance.SAMPLED] for row in rollout.rows]
    sampled = np.concatenate(by_row) if by_row else np.zeros(0, np.float32)
    return round(float(sampled.mean(dtype=np.float64)), 5) if sampled.size else None


def _bar(rollout: Rollout) -> list[int]:
    """Return ``[provenance, tokens, provenance, tokens, …]`` of the first row, for the bar in the list."""
    if not rollout.rows:
        return []
    provenance = rollout.rows[0].provenance
    starts = runs(provenance)[:BARS]
    ends = [start for start, _ in starts[1:]] + [len(provenance)]
    return [number for (start, kind), end in zip(starts, ends, strict=True) for number in (kind, end - start)]
