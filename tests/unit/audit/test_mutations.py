"""Every field of saved rollouts is changed, and lines are removed: the audit catches all but what it is said to miss."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from agentrl.audit.run import audit_files, rollout_faults
from agentrl.core.types import Failure, FailureKind, Rollout, Turn
from agentrl.core.types import FinishReason as Finish
from agentrl.obs.rollouts import RolloutFile, RolloutRecorder, write_advantages
from tests.unit.audit.good_rollout import good

Record = dict[str, Any]


def full(name: str) -> Rollout:
    """Return a rollout with something in every field."""
    return dataclasses.replace(
        good(name),
        metrics={"right": 1.0, "turns": 4.0},
        turns=[Turn(text, f"after {text}", Finish.STOP, 0.25) for text in ("cd", "e", "e", "f")],
        failure=Failure(FailureKind.TOOL, "ToolFailure", "gone"),
        seconds=1.5,
        tool_seconds=0.5,
        metadata={"hops": 2, "of": ["a", {"b": None}]},
        label=["Paris", {"also": 1.5}],
    )


def records(tmp_path: Path, count: int = 3) -> tuple[Path, list[Record]]:
    path = tmp_path / "a.jsonl"
    file = RolloutFile(path)
    file.write([full(f"1/0/{number}") for number in range(count)])
    assert audit_files([file.finish()]).violations == []
    return path, [json.loads(line) for line in path.read_bytes().splitlines()]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value that holds no others."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
        return
    for key, each in inner:
        yield from leaves(each, (*path, key))


OTHER = {
    "stop_reason": "truncated", "kind": "sampler", "finish_reason": "length", "fork": "thinking",
}  # fmt: skip


def another(value: Any, key: Any) -> Any:
    """Return a value that the field may have too."""
    if key in OTHER:
        return OTHER[key]
    if value is None or isinstance(value, bool):
        return not value
    return value + ("x" if isinstance(value, str) else 1 if isinstance(value, int) else -0.125)


def changed(record: Record, path: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> Record:
    record = copy.deepcopy(record)
    inner = record
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]], path[-1])
    return record


def caught(path: Path, saved: list[Record]) -> bool:
    path.write_bytes(b"".join(orjson.dumps(record) + b"\n" for record in saved))
    return bool(audit_files([path]).violations)


def test_every_change_of_a_field_is_caught(tmp_path: Path) -> None:
    path, saved = records(tmp_path, 1)
    places = list(leaves(saved[0]))
    assert len(places) > 180
    missed = [place for place in places if not caught(path, [changed(saved[0], place, another)])]
    assert missed == []


def removals(record: Record) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every element of a list or mapping that may have another length."""
    for name in ("turns", "metrics", "metadata", "label", "rows"):
        keys = record[name] if isinstance(record[name], dict) else range(len(record[name]))
        yield from ((name, key) for key in keys)


def test_every_removed_part_is_caught(tmp_path: Path) -> None:
    path, (record,) = records(tmp_path, 1)
    places = list(removals(record))
    assert len(places) == 4 + 2 + 2 + 2 + 3
    for name, key in places:
        less = copy.deepcopy(record)
        del less[name][key]
        assert caught(path, [less]), (name, key)


def shift(record: Record, name: str, by: float) -> None:
    """Change an array of all sampled tokens alike, so that every row agrees with the others."""
    for row in record["rows"]:
        for index, request in enumerate(row["requests"]):
            if request >= 0:
                row[name][index] += by


def rewarded(record: Record) -> None:
    record["reward"] = 1.0


def of_another_task(record: Record) -> None:
    record["prompt_id"] = "task-2"


def observed_other_words(record: Record) -> None:
    record["turns"][1]["observation"] = "other words"


def under_another_agent(record: Record) -> None:
    record["rows"].append({**record["rows"][0], "agent_id": "other"})


def a_boundary_as_sampled(record: Record) -> None:
    row = record["rows"][0]
    row["provenance"][5] = row["mask"][5] = 1
    row["mask_reason"][5], row["requests"][5], row["versions"][5], row["logprobs"][5] = 0, 0, 1, -0.01
    record["sampled_tokens"] += 1


def all_logprobs(record: Record) -> None:
    shift(record, "logprobs", -0.1)


def all_versions(record: Record) -> None:
    shift(record, "versions", 1)


def all_temperatures(record: Record) -> None:
    for row in record["rows"]:
        row["temperature"] = 0.5


CONSISTENT = (
    rewarded, of_another_task, observed_other_words, under_another_agent, a_boundary_as_sampled, all_logprobs,
    all_versions, all_temperatures,
)  # fmt: skip


@pytest.mark.parametrize("mutate", CONSISTENT)
def test_a_change_that_agrees_with_all_else_is_caught(tmp_path: Path, mutate: Callable[[Record], None]) -> None:
    path, saved = records(tmp_path)
    mutate(saved[1])
    assert caught(path, saved)


def test_removed_added_and_moved_lines_are_caught_but_for_the_last(tmp_path: Path) -> None:
    path, saved = records(tmp_path, 4)
    for index in range(3):
        assert caught(path, saved[:index] + saved[index + 1 :])
    assert caught(path, [saved[1], saved[0], *saved[2:]])
    assert caught(path, [*saved, saved[2]])
    assert caught(path, [*saved[:2], {**saved[0], "number": 2, "rollout_id": "1/0/9"}, *saved[2:]])
    assert not caught(path, saved[:3]), "as a killed run leaves it; docs/how_to/viewer.md says so"


@pytest.mark.parametrize("keep", ["all", "first"])
def test_lines_removed_from_the_end_of_a_trained_step_are_caught(tmp_path: Path, keep: Any) -> None:
    recorder = RolloutRecorder(tmp_path, keep=keep)
    rollouts = [
        dataclasses.replace(full(f"1/{group}/{n}"), prompt_id=f"t{group}") for group in (0, 1) for n in range(3)
    ]
    recorder.write(1, rollouts)
    recorder.finish(1, {rollout.rollout_id: 0.5 for rollout in rollouts})
    path = tmp_path / "step_000001.jsonl"
    assert audit_files([path]).violations == []
    lines = path.read_bytes().splitlines(keepends=True)
    for line_count in range(len(lines)):
        path.write_bytes(b"".join(lines[:line_count]))
        whole_task = line_count == 3  # as obs.rollouts=first leaves it
        assert any("lacks" in str(violation) for violation in audit_files([path]).violations) != whole_task, line_count
    write_advantages(tmp_path, 1, {})
    assert audit_files([path]).violations == []


def test_parquet_is_checked_as_lines_are(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    file = RolloutFile(path)
    file.write([full(f"r{number}") for number in range(3)])
    assert audit_files([file.finish()]).violations == []
    table = pq.read_table(path)
    lines = table.to_pylist()
    for name, value in {"reward": 1.0, "prompt_id": "x", "dropped": True, "label": '"y"', "prompt": "no"}.items():
        changed_lines = copy.deepcopy(lines)
        changed_lines[1][name] = value
        pq.write_table(pa.Table.from_pylist(changed_lines, schema=table.schema), path)
        assert audit_files([path]).violations, name
    pq.write_table(pa.Table.from_pylist([lines[0], lines[2]], schema=table.schema), path)
    assert audit_files([path]).violations


def test_one_request_samples_for_one_agent() -> None:
    rollout = good()
    row = dataclasses.replace(rollout.rows[0], key=dataclasses.replace(rollout.rows[0].key, agent_id="other"))
    copied = dataclasses.replace(rollout, rows=[*rollout.rows, row], sampled_tokens=rollout.sampled_tokens + 5)
    assert any("request 'r/0' sampled for agent 'main' too" in fault.words for fault in rollout_faults(copied))
