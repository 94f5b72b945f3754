"""The data of a page: an index of all rollouts, which is loaded at once, and the packed tokens of each.

The index is stored by column. The page unpacks the tokens of a rollout when it is opened::

    zlib( uint32 length of header | header, JSON |
          for each row: token numbers, uint16 or (header "wide") uint32, [T]
                        flags, uint8 [T]: bits 0-1 provenance, bit 2 mask, bits 3-5 mask reason
                        log-probabilities, float16 [S], of the sampled tokens only )

All numbers are little-endian. Token numbers are indices into the page's vocabulary, not the tokenizer's ids. Versions and
requests are run-length encoded in the header: ``[[start, value], …]``. Images of a row are ``[[start, length, digest], …]``:
they are shown in place of these tokens.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.images import Image
from agentrl.core.types import Provenance, Rollout, Row
from agentrl.obs.rollout_format import player_to_dict
from agentrl.obs.viewer.run_files import Entry

_LEVEL = 6


class Vocabulary:
    """Numbers the token ids of a page from 0 in order of occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    @property
    def ids(self) -> list[int]:
        """The tokenizer's id of each number."""
        return list(self._numbers)

    def number(self, ids_T: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return the number of each id, ``[T]``."""
        unique, inverse_T = np.unique(ids_T, return_inverse=True)
        numbers = [self._numbers.setdefault(int(token), len(self._numbers)) for token in unique]
        return np.array(numbers, np.uint32)[inverse_T] if numbers else np.zeros(0, np.uint32)


def pack_rollout(rollout: Rollout, vocabulary: Vocabulary, *, with_images: bool = False) -> bytes:
    """Return a rollout's tokens and the details that are shown when it is opened.

    Args:
        rollout: to pack.
        vocabulary: numbers its tokens.
        with_images: with its images. A page has those of all rollouts once instead.
    """
    numbers = [vocabulary.number(row.token_ids) for row in rollout.rows]
    wide = any(number.size and int(number.max()) > 0xFFFF for number in numbers)
    header = json_bytes(
        {"wide": wide, "rows": [_row_header(row) for row in rollout.rows], **_details(rollout)}
        | ({"images": image_urls(rollout.images.values())} if with_images else {})
    )
    buffers = [struct.pack("<I", len(header)), header]
    for row, number in zip(rollout.rows, numbers, strict=True):
        flags = row.provenance | row.mask << 2 | row.mask_reason << 3
        sampled = row.provenance == Provenance.SAMPLED
        buffers.append(number.astype("<u4" if wide else "<u2").tobytes())
        buffers.append(flags.astype(np.uint8).tobytes())
        with np.errstate(over="ignore"):  # values below float16's range become minus infinity
            buffers.append(row.logprobs[sampled].astype("<f2").tobytes())
    return zlib.compress(b"".join(buffers), _LEVEL)


def image_urls(images: Iterable[Image]) -> dict[str, str]:
    """Return images as ``data:`` URLs by digest. Their types are those of pictures alone: none can hold a script."""
    return {image.digest: image.data_url for image in images}


def _row_header(row: Row) -> dict[str, Any]:
    return {
        "agent": row.key.agent_id,
        "row": row.key.row,
        "fork": row.fork and row.fork.value,
        "tokens": len(row.token_ids),
        "sampled": int((row.provenance == Provenance.SAMPLED).sum()),
        "versions": runs(row.versions),
        "requests": runs(row.requests),
        "request_ids": list(row.request_ids),
        "images": [[span.start, span.length, span.digest] for span in row.images],
    }


def _details(rollout: Rollout) -> dict[str, Any]:
    """Return the details of a rollout; its texts only if it has no rows, because otherwise the tokens have them."""
    failure = rollout.failure
    with_text = not rollout.rows
    turns = [
        {"finish": turn.finish_reason.value, "reward": turn.reward}
        | ({"action": turn.action, "observation": turn.observation} if with_text else {})
        for turn in rollout.turns
    ]
    return {
        "prompt": rollout.prompt if with_text else None,
        "turns": turns,
        "metadata": rollout.metadata,
        "label": rollout.label,
        "player": player_to_dict(rollout) if rollout.episode else None,
        "failure": failure and {"kind": failure.kind.value, "error": failure.error, "message": failure.message},
        "filtered": rollout.filtered,
    }


def runs(values_T: NDArray[Any]) -> list[list[int]]:
    """Return ``[[start, value], …]`` of the runs of equal values."""
    if not len(values_T):
        return []
    starts = [0, *(np.flatnonzero(values_T[1:] != values_T[:-1]) + 1).tolist()]
    return [[start, int(values_T[start])] for start in starts]


def json_bytes(value: Any) -> bytes:
    """Return JSON that browsers can parse: NaN and infinities are null, lone surrogates question marks."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "replace")


def finite(value: Any) -> Any:
    """Return data with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value


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
            "tool_seconds": round(rollout.tool_seconds, 3),
            "logprob": _mean_logprob(rollout),
            "excerpt": last_words(rollout),
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
    "id", "group", "reward", "advantage", "stop", "failure", "dropped", "tokens", "sampled", "turns", "seconds", "tool_seconds",
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


def last_words(rollout: Rollout) -> str:
    """Return the last action of a rollout on one line, at most `EXCERPT` characters of its end; of a failed one the failure."""
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
