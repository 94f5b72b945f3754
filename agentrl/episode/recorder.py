"""Rollouts on disk: one JSON object a line, ``step_000012.jsonl`` a step, with every token and who made it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from agentrl.episode.state import turn_from_dict, turn_to_dict
from agentrl.types import Failure, FailureKind, Rollout, Row, RowKey, StopReason, json_state

_ARRAYS = {
    "token_ids": np.int32,
    "provenance": np.uint8,
    "mask": np.uint8,
    "mask_reason": np.uint8,
    "logprobs": np.float32,
    "versions": np.int32,
    "requests": np.int32,
}


class RolloutRecorder:
    """Writes rollouts under ``folder`` as they come; each is handed to the system before `write` returns.

    A step that is done again after a resume starts its file anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._begun: set[Path] = set()
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, rollouts: Rollout | Sequence[Rollout]) -> Path:
        """Add rollouts to a step's file and return its path."""
        path = self._folder / f"step_{step:06d}.jsonl"
        some = [rollouts] if isinstance(rollouts, Rollout) else rollouts
        lines = b"".join(orjson.dumps(_to_dict(rollout), option=_OPTIONS) for rollout in some)
        with path.open("ab" if path in self._begun else "wb") as file:
            file.write(lines)
        self._begun.add(path)
        return path


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def read_rollouts(path: Path) -> list[Rollout]:
    """Return the rollouts of a file; a last line that a kill cut short is left out."""
    lines = path.read_bytes().split(b"\n")
    return [_from_dict(orjson.loads(line)) for line in lines[:-1]]


def _to_dict(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "prompt_id": rollout.prompt_id,
        "rollout_id": rollout.rollout_id,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason.value,
        "metrics": rollout.metrics,
        "prompt": rollout.prompt,
        "turns": [turn_to_dict(turn) for turn in rollout.turns],
        "failure": failure and {"kind": failure.kind.value, "error": failure.error, "message": failure.message},
        "dropped": rollout.dropped,
        "seconds": rollout.seconds,
        "sampled_tokens": rollout.sampled_tokens,
        "metadata": json_state(rollout.metadata),
        "rows": [_row_to_dict(row) for row in rollout.rows],
    }


def _row_to_dict(row: Row) -> dict[str, Any]:
    arrays = {name: getattr(row, name) for name in _ARRAYS}
    return {"agent_id": row.key.agent_id, "row": row.key.row, "request_ids": row.request_ids, **arrays}


def _from_dict(data: Mapping[str, Any]) -> Rollout:
    failure = data["failure"]
    return Rollout(
        prompt_id=data["prompt_id"],
        rollout_id=data["rollout_id"],
        rows=[_row_from_dict(data["prompt_id"], data["rollout_id"], row) for row in data["rows"]],
        reward=data["reward"],
        stop_reason=StopReason(data["stop_reason"]),
        metrics=data["metrics"],
        turns=[turn_from_dict(turn) for turn in data["turns"]],
        prompt=data["prompt"],
        failure=failure and Failure(FailureKind(failure["kind"]), failure["error"], failure["message"]),
        dropped=data["dropped"],
        seconds=data["seconds"],
        sampled_tokens=data["sampled_tokens"],
        metadata=data["metadata"],
    )


def _row_from_dict(prompt_id: str, rollout_id: str, data: Mapping[str, Any]) -> Row:
    key = RowKey(prompt_id, rollout_id, data["agent_id"], data["row"])
    arrays = {name: np.array(data[name], kind) for name, kind in _ARRAYS.items()}
    return Row(key=key, request_ids=tuple(data["request_ids"]), **arrays)
