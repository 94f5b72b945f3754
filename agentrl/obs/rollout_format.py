"""Conversion of rollouts to and from JSON-able data, with every token and its provenance."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import orjson

from agentrl.config.secret_values import hide_secrets
from agentrl.core.images import Image, ImageSpan
from agentrl.core.sampling_support import decode_support, encode_support
from agentrl.core.types import (
    EndpointRecord,
    Failure,
    FailureKind,
    FinishReason,
    ForkReason,
    RewardTerm,
    Rollout,
    Row,
    RowKey,
    SeatRecord,
    StopReason,
    ToolUse,
    Turn,
    json_state,
)
from agentrl.obs.image_files import image_name

ARRAYS: dict[str, type[np.generic]] = {
    "token_ids": np.int32,
    "provenance": np.uint8,
    "mask": np.uint8,
    "mask_reason": np.uint8,
    "logprobs": np.float32,
    "versions": np.int32,
    "requests": np.int32,
}
"""The arrays of a `Row`, each ``[T]``, and their dtypes."""

PLAYER = ("agent", "role", "seat", "policy", "opponent", "episode", "seat_rewards")
"""The fields of a `Rollout` that only multi-agent episodes set; ``seats`` is another."""
SEAT = ("agent", "role", "player", "trained", "steps", "moves")
"""The fields of a `SeatRecord`."""

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def encode_rollout(rollout: Rollout, number: int | None = None) -> bytes:
    """Return a rollout as one line of JSON. Values in labels and texts that JSON cannot represent are written as text.

    Args:
        rollout: to encode.
        number: its place in its file, from 0; None if it is in no file.
    """
    return portable_json(rollout_to_dict(rollout, number), _OPTIONS)


def rollout_to_dict(rollout: Rollout, number: int | None = None) -> dict[str, Any]:
    """Return a rollout with its place in its file as a dictionary; the arrays of its rows stay NumPy arrays."""
    rows = [_row_to_dict(row) for row in rollout.rows]
    return {
        **_record(rollout),
        "number": number,
        "checksum": _checksum(rollout, number, [row["crc32"] for row in rows]),
        "rows": rows,
    }


def rollout_checksum(rollout: Rollout, number: int | None, saved_fields: Collection[str]) -> int:
    """Return the CRC-32 of a rollout, all of its rows and its place in its file; it is stored for ``agentrl audit``.

    It finds damage and careless changes. It is no signature: who changes a file can compute it again.

    Args:
        rollout: as it was read.
        number: its place in its file, from 0; None if it is in no file.
        saved_fields: those of the record that was read; an earlier version of agentrl had fewer.
    """
    return _checksum(rollout, number, [row_checksum(row) for row in rollout.rows], saved_fields)


def _checksum(
    rollout: Rollout, number: int | None, rows: Sequence[int], saved_fields: Collection[str] | None = None
) -> int:
    keys = [(row.key.agent_id, row.key.row) for row in rollout.rows]
    numbers = {name: float(getattr(rollout, name)) for name in ("reward", "seconds", "tool_seconds")}
    metrics = {key: float(value) for key, value in rollout.metrics.items()}
    record = {**_record(rollout), **numbers, "metrics": metrics}
    if saved_fields is not None:
        record = {name: value for name, value in record.items() if name in saved_fields}
    data = {**record, "number": number, "rows": rows, "keys": keys}
    return zlib.crc32(portable_json(data, orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_SORT_KEYS))


def portable_json(data: Mapping[str, Any], options: int = 0) -> bytes:
    """Return JSON, with text in place of values that it cannot represent; ``options`` are orjson's."""
    try:
        return orjson.dumps(data, option=options)
    except TypeError:  # base class of orjson.JSONEncodeError
        return orjson.dumps(_portable(data), option=options)


def _record(rollout: Rollout) -> dict[str, Any]:
    """Return all but the rows."""
    failure = rollout.failure
    return {
        "prompt_id": rollout.prompt_id,
        "rollout_id": rollout.rollout_id,
        "reward": rollout.reward,
        "stop_reason": rollout.stop_reason.value,
        "metrics": rollout.metrics,
        "prompt": rollout.prompt,
        "label": json_state(rollout.label),
        "turns": [turn_to_dict(turn) for turn in rollout.turns],
        "failure": failure
        and {"kind": failure.kind.value, "error": failure.error, "message": hide_secrets(failure.message)},
        "dropped": rollout.dropped,
        "seconds": rollout.seconds,
        "tool_seconds": rollout.tool_seconds,
        "tool_uses": {name: asdict(use) for name, use in rollout.tool_uses.items()},
        "sampled_tokens": rollout.sampled_tokens,
        "metadata": json_state(rollout.metadata),
        **({"rewards": {name: asdict(term) for name, term in rollout.rewards.items()}} if rollout.rewards else {}),
        **({"filtered": rollout.filtered} if rollout.filtered else {}),
        **({} if rollout.endpoint is None else _endpoint_to_dict(rollout.endpoint)),
        **({"player": player_to_dict(rollout)} if rollout.episode else {}),
        **({"images": [image_name(image) for image in rollout.images.values()]} if rollout.images else {}),
    }


def rollout_from_dict(data: Mapping[str, Any], read_image: Callable[[str], Image] | None = None) -> Rollout:
    """Return the rollout of a `rollout_to_dict`; a number that is null in JSON becomes NaN.

    Args:
        data: of the rollout.
        read_image: returns an image by the name of its file; None: the rollout has none, whatever ``data`` names.
    """
    failure = data["failure"]
    images = [] if read_image is None else [read_image(name) for name in data.get("images") or ()]
    return Rollout(
        prompt_id=data["prompt_id"],
        rollout_id=data["rollout_id"],
        rows=[_row_from_dict(data["prompt_id"], data["rollout_id"], row) for row in data["rows"]],
        reward=_number(data["reward"]),
        stop_reason=StopReason(data["stop_reason"]),
        metrics={key: _number(value) for key, value in data["metrics"].items()},
        rewards={name: RewardTerm(**term) for name, term in data.get("rewards", {}).items()},
        turns=[turn_from_dict(turn) for turn in data["turns"]],
        prompt=data["prompt"],
        failure=failure and Failure(FailureKind(failure["kind"]), failure["error"], failure["message"]),
        dropped=data["dropped"],
        filtered=data.get("filtered") or "",
        seconds=data["seconds"],
        tool_seconds=data.get("tool_seconds", 0.0),
        tool_uses={name: ToolUse(**use) for name, use in data.get("tool_uses", {}).items()},
        sampled_tokens=data["sampled_tokens"],
        metadata=data["metadata"],
        label=data.get("label"),
        endpoint=None
        if data.get("endpoint") is None
        else EndpointRecord(messages=tuple(data["messages"]), tools=tuple(data["tools"]), **data["endpoint"]),
        **_player_from_dict(data.get("player")),
        images={image.digest: image for image in images},
    )


def _endpoint_to_dict(record: EndpointRecord) -> dict[str, object]:
    """Return the conversation of a model at an endpoint; ``messages`` and ``tools`` are as supervised fine-tuning reads them."""
    return {
        "endpoint": {"model": record.model, "prompt_tokens": record.prompt_tokens},
        "messages": record.messages,
        "tools": record.tools,
    }


def player_to_dict(rollout: Rollout) -> dict[str, Any]:
    """Return the fields that only multi-agent episodes set as a JSON-able dictionary."""
    seats = [{name: getattr(seat, name) for name in SEAT} for seat in rollout.seats]
    return {name: getattr(rollout, name) for name in PLAYER} | {"seats": seats}


def _player_from_dict(data: Mapping[str, Any] | None) -> dict[str, Any]:
    if data is None:
        return {}
    rewards = tuple(_number(reward) for reward in data["seat_rewards"])
    lists = ("steps", "moves")
    seats = tuple(SeatRecord(**{**seat, **{name: tuple(seat[name]) for name in lists}}) for seat in data["seats"])
    return {**data, "seat_rewards": rewards, "seats": seats}


def row_checksum(row: Row) -> int:
    """Return the CRC-32 of all fields of a row except its key; it is stored with the row, for ``agentrl audit``."""
    small = orjson.dumps([row.request_ids, row.turns, row.fork and row.fork.value, row.temperature])
    checksum = zlib.crc32(small)
    for name, kind in ARRAYS.items():
        array = np.ascontiguousarray(getattr(row, name), np.dtype(kind).newbyteorder("<"))
        checksum = zlib.crc32(array.tobytes(), checksum)
    if row.images:
        checksum = zlib.crc32(orjson.dumps(_spans_to_lists(row.images)), checksum)
    if row.support is None:
        return checksum
    logprobs = b"" if row.support.logprobs is None else row.support.logprobs.tobytes()
    return zlib.crc32(row.support.counts.tobytes() + row.support.token_ids.tobytes() + logprobs, checksum)


def turn_to_dict(turn: Turn) -> dict[str, Any]:
    """Return a turn as a JSON-able dictionary."""
    return {
        "action": turn.action,
        "observation": turn.observation,
        "finish_reason": turn.finish_reason.value,
        "reward": float(turn.reward),
    }


def turn_from_dict(data: Mapping[str, Any]) -> Turn:
    """Return the turn of a `turn_to_dict`."""
    return Turn(data["action"], data["observation"], FinishReason(data["finish_reason"]), _number(data["reward"]))


def _row_to_dict(row: Row) -> dict[str, Any]:
    arrays = {name: getattr(row, name) for name in ARRAYS}
    return {
        "agent_id": row.key.agent_id,
        "row": row.key.row,
        "request_ids": row.request_ids,
        "turns": row.turns,
        "fork": row.fork and row.fork.value,
        "temperature": row.temperature,
        "crc32": row_checksum(row),
        **({} if row.support is None else {"support": encode_support(row.support)}),
        **({"images": _spans_to_lists(row.images)} if row.images else {}),
        **arrays,
    }


def _spans_to_lists(spans: Sequence[ImageSpan]) -> list[list[str]]:
    """Return spans as lists of start, length and digest; texts, because a column of parquet has one type."""
    return [[str(span.start), str(span.length), span.digest] for span in spans]


def _row_from_dict(prompt_id: str, rollout_id: str, data: Mapping[str, Any]) -> Row:
    key = RowKey(prompt_id, rollout_id, data["agent_id"], data["row"])
    arrays: dict[str, Any] = {name: np.asarray(data[name], kind) for name, kind in ARRAYS.items()}
    return Row(
        key=key,
        request_ids=tuple(data["request_ids"]),
        turns=tuple(data["turns"]),
        fork=ForkReason(data["fork"]) if data["fork"] else None,
        temperature=_number(data["temperature"]),
        support=decode_support(data.get("support")),
        images=tuple(ImageSpan(int(start), int(size), digest) for start, size, digest in data.get("images") or ()),
        **arrays,
    )


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _portable(value: Any) -> Any:
    """Return JSON-able data: lone surrogates replaced, integers beyond 64 bits and other objects as text."""
    if isinstance(value, Mapping):
        return {_portable(str(key)): _portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_portable(item) for item in value]
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return str(value)
    if value is None or isinstance(value, bool | int | float | np.ndarray):
        return value
    return str(value).encode("utf-8", "replace").decode("utf-8")
