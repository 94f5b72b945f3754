"""The journal in virtual time: a run that is killed at any moment trains each group once when it is resumed."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, LearnerError, RunStopped, SamplerError
from agentrl.core.types import Generation, Prompt, Rollout, SamplingParams
from agentrl.learner.checkpoints import checkpoint_step, latest_checkpoint
from agentrl.obs import journal as format_of_journal
from agentrl.obs.journal import JOURNAL, LOG, read_journal
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.testing import FakeLearner
from agentrl.train.pipeline.journal import Journal
from agentrl.train.rollout_source import TaskPosition
from tests.unit.train.async_world import Engines, make_config, train

STEPS = 8


class Killed(BaseException):
    """Ends the process: nothing is saved after it."""


@pytest.fixture
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets the run be killed after so many records."""
    written = format_of_journal.JournalLog.write

    def after(records: int) -> None:
        records_left = [records]

        def write(log: format_of_journal.JournalLog, event: str, **fields: Any) -> None:
            if records_left[0] <= 0:
                raise Killed
            records_left[0] -= 1
            written(log, event, **fields)

        monkeypatch.setattr(format_of_journal.JournalLog, "write", write)

    return after


def rollouts_of(folder: Path) -> dict[int, list[Rollout]]:
    return {step: read_rollouts(path) for step, path in rollout_files(folder).items()}


def content(batch: GlobalBatch) -> list[Any]:
    """All that a learner gets."""
    values = [getattr(micro, name) for share in batch.micro for micro in share for name in micro.__slots__]
    return [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]


def check(folder: Path) -> None:
    """Every group of the finished run was trained once."""
    trained = Counter(rollout.rollout_id for step_rollouts in rollouts_of(folder).values() for rollout in step_rollouts)
    expected = {
        f"{step}/{offset}/{sample}" for step in range(1, STEPS + 1) for offset in range(4) for sample in range(2)
    }
    assert trained == Counter(expected)
    state = read_journal(folder)
    assert state is not None
    assert state.faults() == []
    assert state.waiting == []
    assert state.trained == STEPS
    assert sorted(position for batch in state.batches.values() for position in batch.positions) == list(
        range(4 * STEPS)
    )


class Learner(FakeLearner):
    """Checks that a step is trained with the same tokens each time."""

    def __init__(self, first: int, seen: dict[int, list[Any]]) -> None:
        """Train ``first`` first."""
        super().__init__()
        self.first, self.seen = first, seen

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        step = self.first + self.steps
        assert self.seen.setdefault(step, content(batch)) == content(batch), f"step {step}"
        return super().train_step(batch)


def go_on(folder: Path, config: Any, seen: dict[int, list[Any]], seed: int) -> None:
    checkpoint = latest_checkpoint(folder / "checkpoints") if folder.exists() else None
    first = checkpoint_step(checkpoint) + 1 if checkpoint else 1
    train(folder, config, seed=seed, learner=Learner(first, seen))


@pytest.mark.parametrize(("staleness", "save_every"), [(0, 3), (1, 1), (4, 3)])
def test_a_run_that_is_killed_at_random_records_trains_each_group_once(
    tmp_path: Path, kill_at: Callable[[int], None], staleness: int, save_every: int
) -> None:
    rng = random.Random(staleness)
    config = make_config(f"train.steps={STEPS}", f"train.save_every={save_every}", f"async.max_staleness={staleness}")
    seen: dict[int, list[Any]] = {}
    for kill in range(6):
        kill_at(rng.randrange(1, 40))
        with suppress(Killed):
            go_on(tmp_path, config, seen, seed=kill)
    kill_at(10**6)
    go_on(tmp_path, config, seen, seed=99)
    check(tmp_path)


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_journal_that_is_cut_at_any_byte_loses_no_group_and_trains_none_twice(tmp_path: Path, staleness: int) -> None:
    """As after a power failure: what was written last is not on the disk."""
    config = make_config(f"train.steps={STEPS}", "train.save_every=2", f"async.max_staleness={staleness}")
    with suppress(LearnerError):
        train(tmp_path / "run", config, learner=FakeLearner(fail_at=5))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000005")
    log = (tmp_path / "run" / JOURNAL / LOG).read_bytes()
    rng = random.Random(staleness)
    for number, size in enumerate(rng.sample(range(len(log)), 5)):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", folder)
        (folder / JOURNAL / LOG).write_bytes(log[:size])
        train(folder, config, seed=number)
        tasks = Counter(
            rollout.prompt_id for step_rollouts in rollouts_of(folder).values() for rollout in step_rollouts
        )
        assert len(tasks) == 4 * STEPS
        assert set(tasks.values()) == {2}, f"cut at byte {size} of {len(log)}"


def test_damage_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    config = make_config("train.steps=3", "train.save_every=0", "async.max_staleness=1")
    with suppress(LearnerError):
        train(tmp_path, config, learner=FakeLearner(fail_at=2))
    shutil.rmtree(tmp_path / "checkpoints")
    log = tmp_path / JOURNAL / LOG
    data = log.read_bytes()
    at = data.index(b"admitted")
    log.write_bytes(data[:at] + b"A" + data[at + 1 :])
    with pytest.raises(ConfigError, match=r"log\.jsonl, line 2 is damaged: .* Move .*journal away to resume"):
        Journal(tmp_path)
    log.write_bytes(data)
    [group, *_] = sorted((log.parent / "groups").iterdir())
    full_content = group.read_bytes()
    group.write_bytes(full_content[:-40] + b"x" + full_content[-39:])
    with pytest.raises(ConfigError, match=r"00000000\.rollouts, record 2 .*damaged"):
        Journal(tmp_path, keys=recorded_keys(config)).read_group(0)
    group.unlink()
    with pytest.raises(
        ConfigError, match=r"does not reach back to the checkpoint of step 0: .*00000000\.rollouts is missing"
    ):
        Journal(tmp_path, keys=recorded_keys(config))


def test_rollouts_that_all_kept_checkpoints_have_trained_are_removed(tmp_path: Path) -> None:
    train(tmp_path, make_config("train.steps=6", "train.save_every=2", "async.max_staleness=1"))
    kept_paths = sorted(int(path.stem) for path in (tmp_path / JOURNAL / "groups").iterdir())
    state = read_journal(tmp_path)
    assert state is not None
    needed_positions = sorted(position for step in (5, 6) for position in state.batches[step].positions)
    assert set(needed_positions) <= set(kept_paths)
    assert len(kept_paths) < 24


@pytest.mark.parametrize(("then", "staleness"), [("[zero_variance]", 1), ("[]", 1), ("[]", 0)])
def test_groups_that_were_filtered_before_a_kill_stay_filtered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str, staleness: int
) -> None:
    """The journal knows them as dropped, and no step has taken its groups yet."""
    fixed = ("train.steps=4", f"async.max_staleness={staleness}")
    written, count = format_of_journal.JournalLog.write, 0

    def write(log: format_of_journal.JournalLog, event: str, **fields: Any) -> None:
        nonlocal count
        written(log, event, **fields)
        count += event == "dropped"
        if count == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(format_of_journal.JournalLog, "write", write)
        with pytest.raises(Killed):
            train(tmp_path, make_config(*fixed, "rollout.filter_groups.filters=[zero_variance]"))
    journal_before = read_journal(tmp_path)
    assert journal_before is not None
    dropped = {group.position for group in journal_before.untaken if group.dropped}
    assert dropped
    run = train(tmp_path, make_config(*fixed, f"rollout.filter_groups.filters={then}"))
    state = read_journal(tmp_path)
    assert state is not None
    assert state.faults() == []
    assert [len(state.batches[step].positions) for step in range(1, 5)] == [4] * 4
    assert dropped <= {position for batch in state.batches.values() for position in batch.dropped}
    assert not state.waiting, "no group began that no step trains"
    assert run.position.first == max(state.groups) + 1


class Outage(Engines):
    """Requests of some episodes of each group fail."""

    samples: tuple[int, ...] = ()
    """Their numbers."""

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        if int(names["session_id"].split("/")[2]) in self.samples:
            raise SamplerError("no route to the engine")
        return await super().generate(prompt, params, **names)


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("filters", ["[]", "[incomplete]"])
@pytest.mark.parametrize("samples", [(0, 1), (1,)])
def test_a_run_that_an_outage_stopped_is_resumed_and_samples_the_failed_episodes_again(
    tmp_path: Path, staleness: int, filters: str, samples: tuple[int, ...]
) -> None:
    config = make_config(
        "train.steps=3",
        f"async.max_staleness={staleness}",
        f"rollout.filter_groups.filters={filters}",
        "rollout.filter_groups.max_num_gen_batches=2",
        "rollout.failure.sampler=drop",
        "rollout.failure.max_failed_share=0.3",
    )
    engines = Outage(0)
    engines.samples = samples
    with pytest.raises(RunStopped, match=r"episodes failed for good"):
        train(tmp_path, config, engines=engines)
    train(tmp_path, config)
    state = read_journal(tmp_path)
    assert state is not None
    assert state.faults() == []
    assert not any(group.dropped for group in state.groups.values())
    trained = Counter(one.rollout_id for some in rollouts_of(tmp_path).values() for one in some if not one.dropped)
    assert len(trained) == 24
    assert set(trained.values()) == {1}


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_that_the_limit_of_generated_batches_stopped_goes_on_with_other_tasks(
    tmp_path: Path, staleness: int
) -> None:
    def config(filters: str) -> Config:
        limit = "rollout.filter_groups.max_num_gen_batches=2"
        return make_config(
            "train.steps=2", f"async.max_staleness={staleness}", f"rollout.filter_groups.filters={filters}", limit
        )

    everything = f"[{__file__}:drops_all]"
    for _ in range(2):
        with pytest.raises(RunStopped, match=r"step 1 has no full batch: 5 groups were filtered"):
            train(tmp_path, config(everything))
    train(tmp_path, config("[]"))
    state = read_journal(tmp_path)
    assert state is not None
    assert state.faults() == []
    assert sum(bool(group.dropped) for group in state.groups.values()) == 10


def drops_all(group: Sequence[Rollout]) -> bool:
    """A filter that drops every group."""
    return True


def test_what_the_journal_has_after_the_checkpoint_can_be_discarded(tmp_path: Path) -> None:
    config = make_config("train.steps=6", "train.save_every=2", "async.max_staleness=1")
    with suppress(LearnerError):
        train(tmp_path, config, learner=FakeLearner(fail_at=4))
    shutil.rmtree(tmp_path / "checkpoints" / "step_000004")
    before = read_journal(tmp_path)
    assert before is not None
    assert [*before.batches] == [1, 2, 3, 4, 5]
    hotter = make_config("train.steps=6", "train.save_every=2", "async.max_staleness=1", "rollout.max_turns=7")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"(?s)trained again: 12 \(24 rollouts.*rollout\.max_turns: 8 → 7"):
        train(tmp_path, hotter)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    train(tmp_path, hotter, seed=5, discard=True)
    state = read_journal(tmp_path)
    assert state is not None
    assert state.faults() == []
    assert {
        group.process for step in (3, 4, 5) for group in map(state.groups.get, state.batches[step].positions) if group
    } == {1}
    trained = Counter(one.rollout_id for some in rollouts_of(tmp_path).values() for one in some)
    assert trained == Counter(
        f"{step}/{offset}/{sample}" for step in range(1, 7) for offset in range(4) for sample in (0, 1)
    )


def test_groups_of_each_process_are_compared_with_its_own_keys(tmp_path: Path) -> None:
    """A resume from an older checkpoint uses groups of two processes, of which the first sampled in another way."""
    config, hotter = (make_config("train.steps=4", f"sampler.temperature={value}") for value in (1.0, 0.5))
    journal = Journal(tmp_path, keys=recorded_keys(config)).begin()
    journal.record_admitted(0, 0)
    journal.close()
    with pytest.raises(ConfigError, match=r"sampler\.temperature"):
        Journal(tmp_path, keys=recorded_keys(hotter))
    again = Journal(tmp_path, position=TaskPosition(1), keys=recorded_keys(hotter)).begin()
    again.record_admitted(1, 0)
    again.close()
    Journal(tmp_path, position=TaskPosition(1), keys=recorded_keys(hotter))
    with pytest.raises(ConfigError, match=r"sampler\.temperature: 0\.5 → 1\.0"):
        Journal(tmp_path, position=TaskPosition(1), keys=recorded_keys(config))
    with pytest.raises(ConfigError, match=r"sampler\.temperature: 1\.0 → 0\.5"):
        Journal(tmp_path, keys=recorded_keys(hotter))
