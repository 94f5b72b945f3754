"""Which episodes of an interrupted evaluation are not played again."""

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config.evaluation import EvalSet
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Failure, FailureKind, Message, Rollout, SeatRecord, StopReason
from agentrl.evaluation.saved_samples import SavedSamples, keys_path
from agentrl.evaluation.sets import EvalTasks
from agentrl.obs.rollouts import RolloutFile, read_rollouts

TASKS = [Task(name, (Message("user", name),)) for name in ("a", "b")]
SET = EvalTasks("", EvalSet(n_samples=2), TASKS, "the split 'eval'")
CONFIG = ["env.name=single_turn", "model={endpoint: {url: 'http://127.0.0.1:1/v1', model: m}}"]


def rollout(name: str, **fields: object) -> Rollout:
    return replace(Rollout(name.split("/")[1], name, [], 1.0, StopReason.TERMINATED), **fields)


def resume(path: Path, *rollouts: Rollout, keys: tuple[str, ...] = (), eval_set: EvalTasks = SET) -> list[str]:
    """Write the file of an evaluation that was killed, and return the episodes that a resumed one does not play."""
    config = load_config(None, [*CONFIG, *keys])
    SavedSamples(path, config, [eval_set], resume=False)
    RolloutFile(path).write(rollouts)
    saved = SavedSamples(path, config, [eval_set], resume=True)
    written = [member.rollout_id for member in read_rollouts(saved.file.lines)]
    assert written == [member.rollout_id for members in saved.finished.values() for member in members]
    return list(saved.finished)


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_episodes_that_have_ended_are_kept_and_dropped_ones_are_played_again(tmp_path: Path, name: str) -> None:
    failed = Failure(FailureKind.SAMPLER, "SamplerError", "gone")
    kept = resume(
        tmp_path / name,
        rollout("eval/a/0"),
        rollout("eval/a/1", failure=failed, dropped=True),
        rollout("eval/b/0", failure=failed),  # trained as it is
        rollout("eval/other/0"),  # of no task of the set
    )
    assert kept == ["eval/a/0", "eval/b/0"]


def test_an_evaluation_that_is_complete_plays_nothing(tmp_path: Path) -> None:
    path, config = tmp_path / "x.parquet", load_config(None, CONFIG)
    samples = SavedSamples(path, config, [SET], resume=True)  # there is no file yet
    for name in ("eval/a/0", "eval/a/1", "eval/b/0", "eval/b/1"):
        samples.file.write(rollout(name))
    samples.file.finish()
    assert len(SavedSamples(path, config, [SET], resume=True).finished) == 4


def test_an_episode_of_several_agents_is_kept_with_all_its_rollouts(tmp_path: Path) -> None:
    seats = (SeatRecord("x", "x", "policy", True, (), ()), SeatRecord("o", "o", "random", True, (), ()))
    members = [
        rollout(f"eval/a/{sample}.{agent}", episode=f"eval/a/{sample}", seats=seats)
        for sample, agent in ((0, "x"), (1, "x"), (0, "o"))
    ]
    assert resume(tmp_path / "x.jsonl", *members) == ["eval/a/0"]


def test_the_last_episode_of_a_loop_is_played_again_as_it_may_lack_rollouts(tmp_path: Path) -> None:
    members = [rollout("eval/a/0"), rollout("eval/a/0.1"), rollout("eval/b/0")]
    assert resume(tmp_path / "x.jsonl", *members, keys=("rollout.generate=a:b",)) == ["eval/a/0"]


def test_a_task_that_is_graded_as_a_whole_is_played_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("def score(samples):\n    return [1.0] * len(samples)\n")
    names = ("eval/a/0", "eval/a/1", "eval/b/0")
    assert resume(tmp_path / "x.jsonl", *map(rollout, names)) == [*names]
    key = f"reward.function={tmp_path}/grade.py:score"
    assert resume(tmp_path / "x.jsonl", *map(rollout, names), keys=(key,)) == ["eval/a/0", "eval/a/1"]


def test_samples_of_another_evaluation_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    resume(path, rollout("eval/a/0"))
    for keys, eval_set, words in (
        (["model.endpoint.model=n"], SET, "model.endpoint.model: m → n"),
        (["rollout.max_turns=3"], SET, "rollout.max_turns: 8 → 3"),
        ([], replace(SET, plan=EvalSet(n_samples=2, temperature=0.0)), "eval.eval: .*temperature 1.*greedy"),
        ([], replace(SET, tasks=[TASKS[0], replace(TASKS[1], answer="c")]), "content of eval eval: 2 tasks"),
    ):
        with pytest.raises(ConfigError, match=words):
            SavedSamples(path, load_config(None, [*CONFIG, *keys]), [eval_set], resume=True)
        assert len(read_rollouts(path)) == 1
    keys_path(path).unlink()
    with pytest.raises(ConfigError, match="what the samples next to it were made with"):
        SavedSamples(path, load_config(None, CONFIG), [SET], resume=True)
