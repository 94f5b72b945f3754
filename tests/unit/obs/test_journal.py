"""The records of a journal: what shows that a group was lost or trained twice, and what counts after a kill."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.obs.journal import JOURNAL, LOG, JournalLog, JournalState, read_journal

Record = tuple[str, dict[str, Any]]


def begin(step: int = 0, first: int = 0, ahead: Iterable[int] = (), *, discards: bool = False) -> Record:
    return "begin", {"step": step, "first": first, "ahead": [*ahead], "keys": {}, "discards": discards}


def sampled(*positions: int) -> list[Record]:
    return [
        record
        for position in positions
        for record in (
            ("admitted", {"position": position, "version": 0}),
            ("finished", {"position": position, "rollouts": 2, "failed": 0, "order": [1, 0]}),
        )
    ]


def taken(step: int, *positions: int, first: int, ahead: Iterable[int] = ()) -> Record:
    return "taken", {"step": step, "positions": positions, "dropped": [], "first": first, "ahead": [*ahead]}


def trained(step: int) -> Record:
    return "trained", {"step": step}


def written(folder: Path, records: Iterable[Record]) -> JournalState:
    log = JournalLog(folder)
    for event, fields in records:
        log.write(event, **fields)
    log.sync()
    log.close()
    state = read_journal(folder)
    assert state is not None
    return state


STEP_1 = [begin(), *sampled(0, 2), taken(1, 0, 2, first=1, ahead=[2]), trained(1)]
DROPPED: Record = ("dropped", {"position": 1, "reason": "zero_variance"})


def test_a_run_that_was_killed_and_resumed(tmp_path: Path) -> None:
    first = [*STEP_1, *sampled(1, 3), taken(2, 1, 3, first=4)]
    state = written(tmp_path, first)
    assert (state.trained, state.last_batch, state.faults()) == (1, 2, [])
    assert state.waiting == []
    again = [begin(), trained(1), trained(2), *sampled(4), ("admitted", {"position": 5, "version": 2})]
    state = written(tmp_path, again)
    assert (state.trained, state.begins, state.faults()) == (2, 2, [])
    assert [(group.position, group.finished, group.version) for group in state.waiting] == [(4, True, 0), (5, False, 2)]


def test_a_run_without_a_journal(tmp_path: Path) -> None:
    assert read_journal(tmp_path) is None


def test_an_older_run_begins_its_journal_at_a_checkpoint(tmp_path: Path) -> None:
    state = written(tmp_path, [begin(7, 14, [15]), *sampled(14, 16), taken(8, 14, 16, first=17), trained(8)])
    assert state.faults() == []
    faults = written(tmp_path, [*sampled(15), taken(9, 15, first=17), trained(9)]).faults()
    assert "group 15 was trained in step 9, and before the journal began" in faults


@pytest.mark.parametrize(
    ("records", "fault"),
    [
        ([*STEP_1, *sampled(3), taken(2, 2, 3, first=4), trained(2)], "group 2 was trained 2 times: in the steps 1, 2"),
        ([*STEP_1, *sampled(3), taken(2, 3, first=4), trained(2)], "1 group(s) were lost, neither trained nor dropped: 1"),
        ([begin(), *sampled(0, 1), taken(1, 0, 1, first=1), trained(1)], "trained, and are to be trained again: 1"),
        ([*STEP_1, *sampled(1), DROPPED, taken(2, 1, first=3), trained(2)], "trained in step 2, and dropped: zero_variance"),
        ([begin(), trained(1)], "step 1 was trained, but took no groups"),
        ([begin(), sampled(0)[0], taken(1, 0, first=1), trained(1)], "group 0 was trained in step 1, but not finished"),
        ([*STEP_1, trained(3)], "step 3 was trained after step 1"),
        ([*STEP_1, begin(), taken(1, 0, 1, first=2), trained(1)], "step 1 was trained again with other groups than before"),
        ([*STEP_1, begin(1, 2)], "the checkpoint of step 1 has the position 2, the journal 1 and 1 ahead"),
    ],
)  # fmt: skip
def test_what_is_wrong(tmp_path: Path, records: list[Record], fault: str) -> None:
    assert any(fault in fault_text for fault_text in written(tmp_path, records).faults())


def test_a_dropped_group_is_accounted_for(tmp_path: Path) -> None:
    state = written(tmp_path, [*STEP_1, *sampled(1, 3), DROPPED, taken(2, 3, first=4), trained(2)])
    assert (state.faults(), state.waiting) == ([], [])


def test_an_incomplete_last_record_is_cut_off_and_other_damage_is_an_error(tmp_path: Path) -> None:
    written(tmp_path, STEP_1)
    path = tmp_path / JOURNAL / LOG
    full_content = path.read_bytes()
    path.write_bytes(full_content[:-9])
    state = read_journal(tmp_path)
    assert state is not None
    assert state.trained == 0, "the last record does not count"
    assert written(tmp_path, [trained(1)]).trained == 1
    lines = full_content.splitlines(keepends=True)
    damaged: Mapping[str, bytes] = {
        "line 2 is damaged: .*checksum": lines[0] + lines[1].replace(b"admitted", b"finished") + lines[2],
        "line 2 is damaged: KeyError": lines[0] + lines[2],
        "line 1 is damaged: .*checksum": b"\n" + full_content,
    }
    for words, data in damaged.items():
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=rf"log\.jsonl, {words}"):
            read_journal(tmp_path)
