"""`train.epochs`: each task is taken as often as it says, whatever is in progress, filtered, lost or resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.data_source import take_first
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.core.task import Task
from agentrl.data.application_tasks import Placeholders
from agentrl.data.buffer import DataBuffer, Epochs
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import count_epochs
from agentrl.obs.expected_steps import expected_steps
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.testing import FakeLearner
from agentrl.train.preflight import plan_run
from tests.batches import step_settings
from tests.unit.train.async_world import TASKS, make_config, steps, train

ZERO_VARIANCE = "rollout.filter_groups.filters=[zero_variance]"


def times_taken(folder: Path) -> Counter[str]:
    """How many groups each task had, filtered ones included."""
    groups = {
        (rollout.prompt_id, rollout.rollout_id.rpartition("/")[0])
        for path in rollout_files(folder).values()
        for rollout in read_rollouts(path)
    }
    return Counter(task for task, _ in groups)


@pytest.mark.parametrize("staleness", [0, 3])
def test_each_task_is_trained_as_often_as_there_are_epochs(tmp_path: Path, staleness: int) -> None:
    run = train(tmp_path, make_config("train.epochs=2", f"async.max_staleness={staleness}"))
    assert (run.step, run.source.steps) == (25, 25), "2 x 50 tasks, 4 a step"
    assert times_taken(tmp_path) == {task.id: 2 for task in TASKS}
    assert [row["data/epoch"] for row in steps(tmp_path)][-1] == 2
    assert run.evaluations.step == 25, "it is evaluated after its last step"


@pytest.mark.parametrize("options", [[], ["async.max_staleness=3", "rollout.over_sampling_batch_size=9"]])
def test_filtered_groups_count_and_the_run_ends_without_a_full_batch(tmp_path: Path, options: list[str]) -> None:
    run = train(tmp_path, make_config("train.epochs=1", ZERO_VARIANCE, *options))
    taken = times_taken(tmp_path)
    assert 0 < run.step < run.source.steps == 12
    assert max(taken.values()) == 1
    assert len(taken) > 40, "those of the batch that was not full were not written"
    assert (run.evaluations.step, run.saved) == (run.step, run.step)


@pytest.mark.parametrize(
    ("staleness", "filters"),
    [
        (0, [ZERO_VARIANCE]),
        (3, [ZERO_VARIANCE]),
        pytest.param(0, [], marks=pytest.mark.long),
        pytest.param(3, [], marks=pytest.mark.long),
    ],
)
def test_a_resumed_run_ends_where_the_other_would_have(tmp_path: Path, staleness: int, filters: list[str]) -> None:
    config = make_config("train.epochs=1", f"async.max_staleness={staleness}", *filters)
    with pytest.raises(LearnerError):
        train(tmp_path, config, seed=1, learner=FakeLearner(fail_at=3))
    run = train(tmp_path, config, seed=2)
    taken = times_taken(tmp_path)
    assert max(taken.values()) == 1
    assert run.step == 12 or filters
    assert run.source.tasks.buffer.untrained == 50 - 4 * 12 or filters  # type: ignore[attr-defined]
    again = train(tmp_path, config, seed=3)
    assert (again.step, times_taken(tmp_path)) == (run.step, taken), "a finished run has no step left"


def test_a_curriculum_draws_as_many_tasks_as_the_epochs_have(tmp_path: Path) -> None:
    run = train(tmp_path, make_config("train.epochs=0.5", "tasks.data_source.name=curriculum"))
    assert (run.step, sum(times_taken(tmp_path).values())) == (6, 24), "25 tasks, of which the last is no batch"


def test_steps_end_the_run_if_they_come_first(tmp_path: Path) -> None:
    assert train(tmp_path / "steps", make_config("train.epochs=2", "train.steps=3")).step == 3
    assert train(tmp_path / "epochs", make_config("train.epochs=0.1", "train.steps=3")).step == 1
    assert load_config(None, ["train.epochs=2"]).train.steps is None
    assert load_config(None, []).train.steps == 100


def test_lost_tasks_are_taken_again_within_their_epoch() -> None:
    buffer = DataBuffer(TaskOrder(TASKS[:4], 0), take_first, "KEY", Epochs(4, 1.0))
    tasks = [buffer[position].id for position in range(4)]
    assert (buffer.has_task(4), buffer.untrained) == (False, 4)
    buffer.on_trained({0, 1}, {}, lost={tasks[1]})
    assert (buffer.has_task(4), buffer.has_task(5), buffer.untrained) == (True, False, 3)
    resumed = DataBuffer(TaskOrder(TASKS[:4], 0), take_first, "KEY", Epochs(4, 1.0))
    resumed.load_state(buffer.state())
    for same in (buffer, resumed):
        assert same[4].id == tasks[1]
        assert (same.has_task(5), same.untrained) == (False, 3)


def test_the_schedule_follows_the_tasks_that_were_used_up() -> None:
    optimizer = "learner.optimizer={schedule: linear, warmup_steps: 0, min_lr_ratio: 0}"
    config = load_config(None, ["train.epochs=1", "train.steps_per_rollout=2", optimizer])
    settings = step_settings(config, epoch_steps=10)
    assert settings.policy_lr_scale(5, 0, 0.5) == pytest.approx(0.5)
    assert settings.policy_lr_scale(5, 1, 0.5) == pytest.approx(0.45), "half a step later"
    assert settings.policy_lr_scale(2, 0, 0.8) == pytest.approx(0.2), "filters used up what 8 steps would"
    both = step_settings(load_config(None, ["train.epochs=1", "train.steps=4", optimizer]), 10)
    assert both.policy_lr_scale(3, 0, 0.3) == pytest.approx(0.25)


def test_expected_steps_are_those_at_the_same_pace() -> None:
    plan = load_config(None, ["train.epochs=2"]).train
    assert expected_steps(plan, 5, 0.5) == 20
    assert expected_steps(plan, 20, 2.0) == 20
    assert expected_steps(plan.model_copy(update={"steps": 12}), 5, 0.5) == 12
    assert expected_steps(plan, 0, None) == 0


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        (["train.epochs=0"], "train.epochs"),
        (["train.epochs=1", "sources={a: {}, b: {}}"], "train.epochs=1 with sources (a, b)"),
        (
            ["train.epochs=1", "async.streaming=true", "async.max_staleness=1", ZERO_VARIANCE],
            "train.epochs=1 with async.streaming=true and rollout.filter_groups.filters=[zero_variance]",
        ),
    ],
)
def test_what_epochs_do_not_fit_is_refused(settings: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.epochs") as error:
        load_config(None, settings)
    assert fault in str(error.value)


def test_a_number_of_tasks_is_needed() -> None:
    config = load_config(None, ["train.epochs=2", "rollout.batch_size=8"])
    assert count_epochs(config, {"": TASKS}) == Epochs(50, 2.0)
    with pytest.raises(ConfigError, match=r"2 of 3 tasks are 6 groups, and a step takes rollout\.batch_size=8"):
        count_epochs(config, {"": [Task(f"t{number}", ()) for number in range(3)]})
    with pytest.raises(ConfigError, match="an application brings the tasks"):
        count_epochs(config, {"": Placeholders("")})
    assert count_epochs(load_config(None, []), {"": TASKS}) is None
    assert Epochs(100, 0.29).limit == 29, "counted in decimals"


def test_the_plan_of_a_run_says_how_many_steps_the_epochs_are(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{number} + 1?", "label": "{number + 1}"}}\n' for number in range(20)))
    files = [f"data.path={rows}", "data.label_key=label", "env.name=single_turn", "reward=exact_match"]
    fixed = [*files, "rollout.batch_size=4", "sampler.backend=embedded"]
    lines = "\n".join(plan_run(load_config(None, [*fixed, "train.epochs=3"])).lines)
    assert "length       15 steps (3 epochs of 20 tasks)" in lines
    lines = "\n".join(plan_run(load_config(None, [*fixed, "train.epochs=3", "train.steps=7", ZERO_VARIANCE])).lines)
    assert "length       7 steps, as train.steps ends the run before 15 steps (3 epochs of 20 tasks), fewer if" in lines
    critic = ["algo.advantage.name=gae", "algo.critic.warmup_steps=15"]
    with pytest.raises(ConfigError, match="which are 15 steps: the policy is never trained"):
        plan_run(load_config(None, [*fixed, "train.epochs=3", *critic]))
