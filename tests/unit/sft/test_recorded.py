"""Recorded rollouts: the rows of the run token for token, which of them are chosen, and what is refused."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import Action, Env, Message, Task
from agentrl.config.load import load_config
from agentrl.config.model import RenderConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.schema import Config
from agentrl.core.env import Step
from agentrl.core.errors import ConfigError
from agentrl.core.types import Provenance, Rollout, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.models.resolve import resolve_model
from agentrl.obs.metrics import read_metrics
from agentrl.obs.rollouts import RolloutFile
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.base import EpochData
from agentrl.sft.preflight import RendererOf, SftRun, prepare_sft
from agentrl.sft.run import sft
from agentrl.testing import ScriptedSampler


class Twice(Env):
    """Lets the policy speak twice."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.turns = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        self.turns += 1
        return (Message("user", "And then?"),), 0.0, self.turns == 2, False, {}


@cache
def shipped() -> ChatRenderer:
    return RendererOf(resolve_model("multihop-warm"), RenderConfig())()


def play(name: str, task: str, reward: float, turns: Sequence[str] = ("first", "second"), **more: Any) -> Rollout:
    """Return a rollout of two turns, sampled with the tokenizer of the shipped policy."""
    renderer = shipped()
    sampler = ScriptedSampler(list(turns), encode=renderer.encode, end_token_id=renderer.end_token_id)
    limits = Limits(9, 10**6, 60.0, 10**6)
    context = EpisodeContext(Twice, renderer, sampler, {}, limits, SamplingParams())
    runner = EpisodeRunner({"": EpisodeSettings(context)}, FailurePolicy(FailureConfig()), EpisodeSlots(1))
    [rollout] = asyncio.run(runner.run_many([Job(Task(task, (Message("user", f"Tell {task}."),)), 0, name)]))
    return replace(rollout, reward=reward, record=b"", **more)


def record(folder: Path, *steps: list[Rollout], form: str = "jsonl") -> Path:
    """Return the folder of a run with these rollouts by step."""
    for step, rollouts in enumerate(steps, 1):
        file = RolloutFile(folder / "rollouts" / f"step_{step:06d}.{form}")
        file.write(rollouts)
        file.finish()
    return folder


def config(path: Path, *overrides: str) -> Config:
    fixed = ("model.path=multihop-warm", "sft.batch_size=2", "learner.device=cpu", "learner.threads=1")
    return load_config(None, [f"sft.rollouts.path={path}", *fixed, "obs.tensorboard=false", *overrides])


def trained_names(run: SftRun) -> list[str]:
    assert isinstance(run.data, EpochData)
    names = [row.key.rollout_id for item in range(len(run.data)) for step in run.data[item] for row in step.rows]
    return sorted(name.removesuffix("#0") for name in names)


@pytest.mark.parametrize("form", ["jsonl", "parquet", "rollouts"])
def test_rows_are_those_that_the_run_trained(tmp_path: Path, form: str) -> None:
    rollouts = [play("1/0/0", "a", 1.0), play("1/0/1", "a", 0.0, ("other", "third"))]
    run = prepare_sft(config(record(tmp_path, rollouts, form=form), "sft.epochs=2"))
    steps = [run.data[item] for item in range(len(run.data))]
    assert [len(step.rows) for [step] in steps] == [2, 2]
    for epoch, [step] in enumerate(steps):
        rows = {row.key.rollout_id.removesuffix(f"#{epoch}"): row for row in step.rows}
        for rollout in rollouts:
            [sampled] = rollout.rows
            row = rows[rollout.rollout_id]
            assert np.array_equal(row.token_ids, sampled.token_ids)
            assert np.array_equal(row.mask, sampled.mask)
            assert np.array_equal(row.mask == 1, sampled.provenance == Provenance.SAMPLED)
    [[step], _] = steps
    first = next(row for row in step.rows if row.key.rollout_id == "1/0/0#0")
    ids = shipped().encode("first")
    assert first.token_ids[first.mask == 1].tolist()[: len(ids)] == list(ids)


REWARDS = {"a": ((1.0, 0.5, 1.0), (0.0, 2.0)), "b": ((0.0, 0.2), (0.0,))}
"""By task and step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    steps: list[list[Rollout]] = [[], []]
    for task, rewards in REWARDS.items():
        for step, group in enumerate(rewards):
            for number, reward in enumerate(group):
                name = f"{step + 1}/{task}/{number}"
                steps[step].append(play(name, task, reward, (f"at {step}", f"number {number}")))
    steps[1].append(play("2/b/copy", "b", 5.0, ("at 0", "number 1")))
    steps[1].append(play("2/b/dropped", "b", 5.0, dropped=True))
    steps[1].append(play("2/b/nan", "b", float("nan")))
    return record(tmp_path_factory.mktemp("run"), *steps)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ([], ["1/a/0", "1/a/1", "1/a/2", "1/b/0", "1/b/1", "2/a/0", "2/a/1", "2/b/0"]),
        (["min_reward=0.5"], ["1/a/0", "1/a/1", "1/a/2", "2/a/1", "2/b/copy"]),
        (["per_group=1"], ["1/a/0", "1/b/1", "2/a/1", "2/b/0"]),
        (["per_task=1"], ["1/b/1", "2/a/1"]),
        (["per_group=2", "per_task=3"], ["1/a/0", "1/a/2", "1/b/0", "1/b/1", "2/a/1", "2/b/0"]),
        (["min_reward=1", "per_group=1"], ["1/a/0", "2/a/1", "2/b/copy"]),
    ],
)
def test_which_rollouts_are_chosen(folder: Path, settings: list[str], names: list[str]) -> None:
    run = prepare_sft(config(folder, *(f"sft.rollouts.{setting}" for setting in settings)))
    assert trained_names(run) == names
    assert any("steps of 2 rollouts" in line for line in run.lines)


def test_what_was_left_out_is_told(folder: Path) -> None:
    [line] = [line for line in prepare_sft(config(folder, "sft.rollouts.per_task=1")).lines if line.startswith("data ")]
    assert "2 rollouts, " in line
    assert "of 11 rollouts, mean reward 1.100" in line
    assert "2 dropped or without tokens to train on; 1 copies of another one of their task; 6 left out by" in line
    run = prepare_sft(config(folder, "sft.eval_share=0.25"))
    assert isinstance(run.data, EpochData)
    assert run.evaluation is not None
    held_out = {*run.data.file.numbers} ^ {*run.evaluation.file.numbers}
    assert (len(held_out), len(run.evaluation.file.numbers)) == (8, 2)


def test_a_single_file(folder: Path) -> None:
    run = prepare_sft(config(folder / "rollouts" / "step_000002.jsonl", "sft.rollouts.min_reward=2"))
    assert trained_names(run) == ["2/a/1", "2/b/copy"]


def with_row(rollout: Rollout, **changes: Any) -> Rollout:
    [row] = rollout.rows
    return replace(rollout, rows=[replace(row, **changes)])


def test_rollouts_that_cannot_be_trained_on(tmp_path: Path) -> None:
    good = play("1/0/0", "a", 1.0)
    [row] = good.rows
    forged = with_row(good, mask=np.ones_like(row.mask), mask_reason=np.zeros_like(row.mask_reason))
    foreign = replace(good, prompt="Another text")
    large = with_row(good, token_ids=np.where(row.mask == 1, 10**6, row.token_ids).astype(np.int32))
    cases: list[tuple[Rollout, list[str], str]] = [
        (forged, [], "rollout 1/0/0: .*1/0/0"),
        (foreign, [], "was sampled with another tokenizer: the prompt 'Another text'"),
        (large, [], "has the token id 1000000, but the model knows"),
        (good, ["sft.rollouts.min_reward=2"], r"has no rollout to train on; .*1 below sft\.rollouts\.min_reward"),
        (good, ["sft.max_tokens=3"], r"has no rollout to train on; .*1 left out by sft\.max_tokens"),
        (good, ["data.path=chats.jsonl"], "both say what to train on"),
        (good, ["sft.reseed_option=seed"], r"sft\.rollouts\.path=.* has rollouts"),
    ]
    for number, (rollout, settings, message) in enumerate(cases):
        path = record(tmp_path / str(number), [rollout])
        with pytest.raises(ConfigError, match=message):
            prepare_sft(config(path, *settings))
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "empty", "holds no rollouts"), (tmp_path / "none", "no such file or folder")):
        with pytest.raises(ConfigError, match=message):
            prepare_sft(config(path))
    with pytest.raises(ConfigError, match=r"sft\.rollouts\.per_task is set without sft\.rollouts\.path"):
        load_config(None, ["sft.rollouts.per_task=1"])


def test_a_policy_is_trained_on_the_best_of_a_run(folder: Path, tmp_path: Path) -> None:
    settings = [
        "sft.rollouts.min_reward=1",
        "sft.epochs=6",
        "learner.optimizer.lr=0.003",
        f"run.dir={tmp_path / 'run'}",
    ]
    lines: list[str] = []
    out = sft(config(folder, *settings), note=lines.append)
    assert (out / "config.json").is_file()
    losses = [row["train/loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 12
    assert losses[-1] < losses[0] / 2
