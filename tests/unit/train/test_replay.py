"""Recorded rollouts as a trainer's source, and what is refused."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from agentrl.algo.estimate import RunEstimators
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.core.types import Rollout, RowKey, StopReason
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.progress import ProgressView
from agentrl.obs.rollouts import RolloutFile, RolloutRecorder
from agentrl.runtime.interrupt import Interrupt
from agentrl.testing import FakeLearner
from agentrl.train.evaluations import Evaluations
from agentrl.train.replay import RecordedRollouts, Replay, SampleCheck, check_replay
from agentrl.train.rollout_source import TaskPosition
from agentrl.train.trainer import Trainer
from agentrl.train.training_step import StepTrainer
from benchmarks.episode_runner import synthetic_rows
from tests.batches import step_settings

VOCABULARY = 1000


class Letters:
    """A renderer that reads a token as a letter, from ``first`` on."""

    pad_token_id = 0

    def __init__(self, first: str = "a") -> None:
        self.first = first

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord(self.first) + token % 26) for token in token_ids)


def rollout(prompt: str, sample: int, reward: float) -> Rollout:
    [row] = synthetic_rows(1, 2, 5)
    fields = {name: getattr(row, name) for name in row.__slots__}
    fields |= {"key": RowKey(prompt, f"{prompt}/{sample}"), "token_ids": row.token_ids % VOCABULARY}
    text = Letters().decode((row.token_ids[: int(row.provenance.argmax())] % VOCABULARY).tolist())
    return Rollout(prompt, f"{prompt}/{sample}", [type(row)(**fields)], reward, StopReason.TERMINATED, prompt=text)


def groups(*prompts: str) -> list[Rollout]:
    return [rollout(prompt, sample, float(sample)) for sample in range(2) for prompt in prompts]


def samples_file(folder: Path, rollouts: list[Rollout], name: str = "samples.jsonl") -> Path:
    file = RolloutFile(folder / name)
    file.write(rollouts)
    return file.finish()


def config(*overrides: str) -> Config:
    return load_config(None, ["rollout.batch_size=2", "rollout.n_samples_per_prompt=2", *overrides])


async def train(
    folder: Path, samples: Path, learner: FakeLearner, run_config: Config, state: dict[str, float] | None = None
) -> Trainer:
    with (
        Interrupt(print) as interrupt,
        ProgressView(Console(quiet=True), run_config.train.steps, "plain") as view,
        MetricsLog(folder, resume_after=state["step"] if state else None) as metrics,  # type: ignore[arg-type]
    ):
        source = Replay(
            run_config,
            RecordedRollouts(samples, run_config.rollout.batch_size),
            SampleCheck(VOCABULARY, Letters(), run_config.sampler.temperature),  # type: ignore[arg-type]
            interrupt,
        )
        steps = StepTrainer(step_settings(run_config), source, learner, RunEstimators(run_config.algo.by_source), view)
        checkpoints = Checkpoints(folder / "checkpoints", keep=3)
        evaluations = Evaluations(run_config.eval, run_config.train, None, checkpoints, metrics, view)
        trainer = Trainer(steps, checkpoints, metrics, view, evaluations)
        if state:
            trainer.step, trainer.position = int(state["step"]), TaskPosition(int(state["position"]))
        await trainer.run()
    return trainer


def test_a_file_is_divided_into_steps_of_whole_groups(tmp_path: Path) -> None:
    samples = RecordedRollouts(samples_file(tmp_path, groups("a", "b", "c")), 2)
    assert len(samples) == 2
    assert [{sample.prompt_id for sample in samples[index]} for index in range(2)] == [{"a", "b"}, {"c"}]


def test_a_run_is_replayed_by_its_steps(tmp_path: Path) -> None:
    recorder = RolloutRecorder(tmp_path / "rollouts", form="parquet")
    for step, prompts in ((1, "abc"), (2, "d")):
        recorder.write(step, groups(*prompts))
        recorder.finish(step, {})
    for path in (tmp_path, tmp_path / "rollouts"):
        samples = RecordedRollouts(path, 2)
        assert [len(samples[index]) for index in range(len(samples))] == [6, 2]


def test_replay_trains_saves_and_goes_on(tmp_path: Path) -> None:
    path = samples_file(tmp_path, groups("a", "b", "c", "d", "e"), "samples.parquet")
    learner = FakeLearner()
    asyncio.run(train(tmp_path / "run", path, learner, config("train.steps=2", "train.save_every=1")))
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    state = read_state(checkpoint)
    assert (state["step"], learner.steps) == (2, 2)
    asyncio.run(train(tmp_path / "run", path, learner, config("train.steps=100"), state))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3], "as many steps as there are samples for"
    assert learner.steps == 3
    assert rows[0]["train/reward"] == 0.5
    assert "time/tokens_per_s" not in rows[0], "nothing was sampled"


def test_a_step_of_several_optimizer_steps(tmp_path: Path) -> None:
    run_config = config("train.steps_per_rollout=2", "batch.global_batch_size=2")
    learner = FakeLearner(metrics={"train/loss": 3.0, "train/ratio_max": 2.0})
    trainer = asyncio.run(train(tmp_path, samples_file(tmp_path, groups("a", "b")), learner, run_config))
    assert (trainer.step, learner.steps) == (1, 2)
    keys = [{key.prompt_id for micro in batch.micro[0] for key in micro.keys} for batch in learner.batches]
    assert keys == [{"a"}, {"b"}]
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert (row["train/optimizer_steps"], row["train/loss"], row["train/ratio_max"]) == (2.0, 3.0, 2.0)
    assert row["batch/rows"] == 4.0


def test_batches_are_packed_as_the_run_says(tmp_path: Path) -> None:
    run_config = config(
        "sampler.temperature=0.7", "learner.ranks=2", "batch.tokens_per_micro=8", "batch.aggregation=rollout_mean"
    )
    rollouts = groups("a", "b")
    for rollout in rollouts:
        rollout.rows[0] = replace(rollout.rows[0], temperature=0.7)
    learner = FakeLearner()
    asyncio.run(train(tmp_path, samples_file(tmp_path, rollouts), learner, run_config))
    [batch] = learner.batches
    assert (batch.temperature, len(batch.micro)) == (0.7, 2)
    keys = [micro.keys for share in batch.micro for micro in share]
    assert all(len(rollout) <= 1 for rollout in keys), (
        "a row is longer than 8 tokens, so it has a micro-batch for itself"
    )
    total = dict.fromkeys(("a/0", "a/1", "b/0", "b/1"), 0.0)
    for micro in (micro for share in batch.micro for micro in share):
        for number, key in enumerate(micro.keys):
            total[key.rollout_id] += float(micro.weight_L[micro.row_L == number].sum())
    assert total == pytest.approx(dict.fromkeys(total, 0.25))


@pytest.mark.parametrize(("rule", "tokens_left"), [("strict", 0.0), ("warn", 1.0)])
def test_the_rule_for_tokens_that_no_engine_sampled_is_the_runs(tmp_path: Path, rule: str, tokens_left: float) -> None:
    rollouts = groups("a", "b")
    row = rollouts[0].rows[0]
    row.versions[int(row.mask.argmax())] = -1
    learner = FakeLearner()
    run_config = config(f"train.provenance={rule}")
    asyncio.run(train(tmp_path, samples_file(tmp_path, rollouts), learner, run_config))
    [batch] = learner.batches
    assert batch.metrics["train/provenance_faults"] == tokens_left
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["train/provenance_faults"] == tokens_left


@pytest.mark.parametrize(("fail_at", "saved"), [(2, 1), (3, None)])
def test_half_a_step_is_never_saved(tmp_path: Path, fail_at: int, saved: int | None) -> None:
    run_config = config("train.steps_per_rollout=2", "train.save_every=0")
    path = samples_file(tmp_path, groups("a", "b", "c", "d"))
    with pytest.raises(LearnerError):
        asyncio.run(train(tmp_path, path, FakeLearner(fail_at=fail_at), run_config))
    checkpoint = latest_checkpoint(tmp_path / "checkpoints")
    assert (checkpoint and read_state(checkpoint)["step"]) == saved


def test_samples_that_cannot_be_trained_on_are_refused() -> None:
    check = SampleCheck(VOCABULARY, Letters(), 1.0)  # type: ignore[arg-type]
    good = groups("a", "b")
    check(good, "here")
    with pytest.raises(ConfigError, match=r"token id \d+, but the model knows 3 tokens.*model\.path"):
        SampleCheck(3, Letters(), 1.0)(good, "here")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="another tokenizer"):
        SampleCheck(VOCABULARY, Letters("A"), 1.0)(good, "here")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'a/0' was sampled at temperature 1, but .*; set sampler\.temperature=1"):
        SampleCheck(VOCABULARY, Letters(), 0.7)(good, "here")  # type: ignore[arg-type]
    for reward in (float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=rf"here: rollout 'a/0' has the reward {reward}"):
            check([rollout("a", 0, reward)], "here")
        replace(check, needs_reward=False)([rollout("a", 0, reward)], "here")
    greedy = rollout("a", 0, 1.0)
    greedy.rows[0] = replace(greedy.rows[0], temperature=0.0)
    with pytest.raises(ConfigError, match=r"temperature 0, .*greedy samples teach nothing"):
        check([greedy], "here")
    for each in good:
        each.dropped = True
    with pytest.raises(ConfigError, match="no token to train on: 4 rollouts, 4 of them dropped"):
        check(good, "here")
    blank = rollout("a", 0, 1.0)
    blank.rows[0].mask[:] = np.uint8(0)
    with pytest.raises(ConfigError, match="no token to train on"):
        check([blank], "here")


def test_a_source_without_rollouts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        RecordedRollouts(tmp_path / "none.jsonl", 2)
    with pytest.raises(ConfigError, match="holds no rollouts"):
        RecordedRollouts(samples_file(tmp_path, []), 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no rollouts"):
        RecordedRollouts(tmp_path / "empty", 2)


def test_a_replay_is_checked_before_anything_starts(tmp_path: Path) -> None:
    path = samples_file(tmp_path / "run", [rollout("a", 0, 1.0)])
    with pytest.raises(ConfigError, match=r"run\.dir"):
        check_replay(config(f"run.dir={tmp_path / 'run'}"), path)
    with pytest.raises(ConfigError, match="self_play=null"):
        check_replay(config("env.name=kuhn_poker", "self_play.engines=1"), path)
    equal = [rollout("a", sample, 1.0) for sample in range(2)]
    for each in equal:
        each.prompt = ""
        each.rows[0].token_ids[:] = 1
    flat = samples_file(tmp_path, equal)
    with pytest.raises(ConfigError, match="nothing to learn"):
        check_replay(config(), flat)
    equal[0].reward = 0.0
    plan = check_replay(config(), samples_file(tmp_path, equal))
    assert "nothing is evaluated" in "\n".join(plan)


def test_state_is_json(tmp_path: Path) -> None:
    trainer = asyncio.run(train(tmp_path, samples_file(tmp_path, groups("a")), FakeLearner(), config()))
    assert json.loads(json.dumps(trainer.state()))["step"] == 1
