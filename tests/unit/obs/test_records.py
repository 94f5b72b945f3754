"""Records of rollouts: bytes from which a rollout comes back as it was, small, with a checksum over all of them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, ForkReason, Message, Rollout, RowKey, StopReason, ToolCall, Turn
from agentrl.obs.records import decode_record, encode_record, split_records
from agentrl.obs.rollouts import RolloutFile, count_rollouts, read_rollouts, rollout_files, scan_rollouts
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.token_ages import mask_stale
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


def without_experts(rollout_id: str) -> Rollout:
    """A rollout of one row."""
    rollout = replace(rollout_of(1), rollout_id=rollout_id)
    rollout.rows = [replace(row, experts=None) for row in rollout.rows]
    return rollout


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


def test_a_file_of_records_has_the_bytes_of_runner_processes(tmp_path: Path) -> None:
    first, second = without_experts("3/0/1"), without_experts("3/0/2")
    sent = encode_record(first)
    first.record, first.reward = sent, -1.0  # the bytes count: nothing is encoded again
    file = RolloutFile(tmp_path / "step_000003.rollouts")
    file.write(first)
    file.write([second])
    assert file.finish().read_bytes() == sent + encode_record(second)
    assert rollout_files(tmp_path) == {3: file.path}
    assert count_rollouts(file.path) == 2
    with file.path.open("ab") as torn:
        torn.write(sent[:20])
    assert [(rollout.rollout_id, rollout.reward) for rollout in read_rollouts(file.path)] == [
        ("3/0/1", 0.1),
        ("3/0/2", 0.1),
    ]
    damaged = bytearray(file.path.read_bytes())
    damaged[len(sent) - 1] ^= 1
    file.path.write_bytes(damaged[:-20])
    with pytest.raises(
        ConfigError, match=r"step_000003\.rollouts, record 1 is not a rollout of agentrl, or is damaged: .*crc32"
    ):
        read_rollouts(file.path)
    reason, rollout = (scanned.rollout for scanned in scan_rollouts(file.path))
    assert "crc32" in str(reason)
    assert isinstance(rollout, Rollout)
    with_experts = rollout_of()
    with_experts.record = encode_record(with_experts)
    file.write(with_experts)
    [*_, last] = (scanned.rollout for scanned in scan_rollouts(file.path))
    assert isinstance(last, Rollout)
    assert last.rows[0].experts is None, "these are large, and only the journal needs them"


def test_journal_and_file_have_the_bytes_of_one_encoding(tmp_path: Path) -> None:
    journal, rollout = Journal(tmp_path).begin(), without_experts("3/0/1")
    journal.record_admitted(0, 0)
    journal.record_ended(0, rollout)
    journal.close()
    rollout.reward = -1.0  # it would be in another encoding
    file = RolloutFile(tmp_path / "step_000003.rollouts")
    file.write(rollout)
    [group] = (tmp_path / "journal" / "groups").iterdir()
    assert file.finish().read_bytes() == group.read_bytes()


def test_a_change_after_the_end_is_encoded_again() -> None:
    rollout = rollout_of()
    rollout.record = encode_record(rollout)
    assert mask_stale([rollout], 10, 1) > 0
    assert not rollout.record
