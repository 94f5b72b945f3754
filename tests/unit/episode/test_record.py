"""Records of rollouts: bytes from which a rollout comes back as it was, small, with a checksum over all of them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, ForkReason, Message, Rollout, RowKey, StopReason, ToolCall, Turn
from agentrl.episode.record import decode_record, encode_record, split_records
from benchmarks.episode_runner import synthetic_rows


def rollout_of(rows: int = 2, turns: int = 3, turn_tokens: int = 5) -> Rollout:
    """A rollout with all that files of rollouts leave out, too."""
    first, *others = synthetic_rows(rows, turns, turn_tokens)
    experts = np.arange(len(first.token_ids) * 4, dtype=np.uint8).reshape(-1, 2, 2)
    first = replace(first, experts=experts, fork=ForkReason.TEMPLATE, temperature=0.7)
    rows_N = [replace(row, key=RowKey("p", "3/0/1", "main", index)) for index, row in enumerate((first, *others))]
    call = ToolCall("c1", "search", {"query": "Tamo ☃"})
    return Rollout(
        prompt_id="p",
        rollout_id="3/0/1",
        rows=rows_N,
        reward=0.1,
        stop_reason=StopReason.TERMINATED,
        metrics={"exact_match": 1.0},
        turns=[Turn("say", "hear\n☃", FinishReason.STOP, 0.1)],
        sampled_tokens=6,
        metadata={"hops": 2},
        label=["Paris", {"also": 1.5}],
        messages=(Message("user", "What?"), Message("assistant", "", (call,), token_ids=(4, 5))),
        tools=(Tool("search", "Searches.", {"type": "object"}),),
    )


def test_a_rollout_comes_back_as_it_was_and_can_be_changed() -> None:
    rollout = rollout_of()
    decoded = decode_record(encode_record(rollout))
    for field in fields(Rollout):
        if field.name not in ("rows", "tools"):
            assert getattr(decoded, field.name) == getattr(rollout, field.name), field.name
    assert [tool.parameters for tool in decoded.tools] == [{"type": "object"}]
    for row, expected in zip(decoded.rows, rollout.rows, strict=True):
        for field in fields(row):
            actual, value = getattr(row, field.name), getattr(expected, field.name)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(actual, value)
                assert (actual.dtype, actual.flags.c_contiguous) == (value.dtype, True), field.name
            else:
                assert actual == value, field.name
        row.mask[:] = 0  # old tokens are masked in place


def test_any_changed_byte_is_an_error() -> None:
    record = encode_record(rollout_of(1, 1, 2))
    for at in range(len(record)):
        damaged = record[:at] + bytes([record[at] ^ 1]) + record[at + 1 :]
        with pytest.raises(ValueError, match=r"crc32|begins with other bytes|incomplete"):
            list(map(decode_record, split_records(damaged)))


def test_an_incomplete_last_record_is_left_out_where_it_may_be() -> None:
    first, second = encode_record(rollout_of()), encode_record(rollout_of(1))
    assert split_records(first + second) == [first, second]
    for size in (1, 15, 16, len(second) - 1):
        assert split_records(first + second[:size], may_be_torn=True) == [first]
        with pytest.raises(ValueError, match="record 2 is incomplete"):
            split_records(first + second[:size])


def test_a_record_takes_a_third_of_its_arrays() -> None:
    rollout = rollout_of(1, 8, 500)
    arrays = sum(array.nbytes for array in map(rollout.rows[0].__getattribute__, ("token_ids", "logprobs", "requests")))
    rollout.rows = [replace(rollout.rows[0], experts=None)]
    assert len(encode_record(rollout)) < arrays / 3
