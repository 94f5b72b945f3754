"""Functions of users, tried on recorded rollouts: what is good has no fault, and each broken contract is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agentrl.cli.main import DONE, FAILED, USER_MISTAKE, main
from agentrl.config.load import load_config
from agentrl.core.types import MaskReason, Provenance, Rollout
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.train.function_check import check_functions
from agentrl.train.function_report import FunctionReport, RecordedStep
from tests.test_readme import example
from tests.unit.obs.viewer.conftest import build

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "own_functions.md"
SOURCES_PAGE = PAGE.with_name("data_sources.md")

OBSERVED = (Provenance.OBSERVED, MaskReason.OBSERVED)
SAMPLED = (Provenance.SAMPLED, MaskReason.NONE)
FUNCTIONS = """
import dataclasses, itertools, math
import numpy as np
import torch
import agentrl
from agentrl.algo.base import AdvantageEstimator, PolicyLoss, TokenLoss

calls = itertools.count()

def reward(sample): return len(sample.prompt_id) + sample.rollout.sampled_tokens / 4
def text_reward(sample): return "good"
def raises(sample): return {}["missing"]
def counts(sample): return float(next(calls))
def flat(sample): return 1.0
def keep(group): return group[0].prompt_id == "p0"
def drop_all(group): return True
def no_bool(group): return len(group)

def convert(samples):
    for sample in samples:
        sample.weight = 2.0
        for row in sample.rows:
            row.mask_T[row.turns_T > 0] = False
            row.reward_T[row.mask_T] = 0.5
    return samples[:3]

def unmask(samples):
    for sample in samples:
        sample.rows[0].mask_T[:] = True
    return samples

def write_ids(samples):
    samples[0].rows[0].row.logprobs[:] = 0.0
    return samples

def replace_row(samples):
    row = samples[0].rows[0]
    row.row = dataclasses.replace(row.row, token_ids=row.row.token_ids * 2)
    return samples

def mask_all(samples):
    for sample in samples:
        sample.rows[0].mask_T[:] = False
    return samples

def rollouts_only(samples): return [sample.rollout for sample in samples]
def nothing(samples): return []
def twice(samples): return [samples[0], samples[0]]
def random_weights(samples):
    for sample in samples:
        sample.weight = 1.0 + next(calls)
    return samples
def reward_context(samples):
    samples[0].rows[0].reward_T[:] = 1.0
    return samples
async def coroutine(samples): return samples

class InOrder(agentrl.DataSource):
    def __init__(self, tasks, seed):
        super().__init__(tasks, seed)
        self.next = 0
    def get_samples(self, num_samples):
        self.next += num_samples
        return [self.tasks[number % len(self.tasks)] for number in range(self.next - num_samples, self.next)]
    def state(self): return {"next": self.next}
    def load_state(self, state): self.next = state["next"]

class Forgets(InOrder):
    def state(self): return {"next": 0}

class NoJson(InOrder):
    def state(self): return {"next": {1}}

class AtRandom(InOrder):
    def get_samples(self, num_samples):
        return [self.tasks[next(calls) % 7] for _ in range(num_samples)]

class TooFew(InOrder):
    def get_samples(self, num_samples): return self.tasks[:1]

def newest(buffer, num_samples): return buffer[-num_samples:]
def no_task(buffer, num_samples): return []
def all_tasks(buffer, num_samples): return buffer
def one_argument(buffer): return buffer

async def loop(task, agent):
    chat = agent.chat(task.prompt)
    while (reply := await chat.sample(max_new_tokens=8)) is not None and chat.turns < 2:
        chat.add(agentrl.Message("user", "go on"))
    return chat.rollout(1.0)
async def silent(task, agent):
    return agent.chat(task.prompt).rollout(1.0)
async def no_rollout(task, agent):
    await agent.chat(task.prompt).sample()
    return 1.0
async def fails(task, agent):
    raise ValueError("no plan")
async def no_reward(task, agent):
    chat = agent.chat(task.prompt)
    await chat.sample(max_new_tokens=8)
    return chat.rollout(math.nan)
@agentrl.uses_tools("search")
async def with_tools(task, agent): return None
async def one_parameter(task): return None

async def best_of(policy):
    rollouts = await policy.rollouts(policy.tasks["eval"], n_samples=2)
    await policy.run_sets()
    return {"best": max(rollout.reward for rollout in rollouts)}
async def plays_nothing(policy): return {"best": 1.0}
async def taken_name(policy):
    await policy.run_sets()
    return {"reward": 7.0}
async def no_mapping(policy):
    await policy.run_sets()

def halves(groups):
    return {rollout.rollout_id: rollout.reward / 2 for group in groups for rollout in group}
def first_group(groups): return {rollout.rollout_id: 1.0 for rollout in groups[0]}
def infinite(groups): return {rollout.rollout_id: math.inf for group in groups for rollout in group}
def too_large(groups): return {rollout.rollout_id: 10**400 for group in groups for rollout in group}
def counted(groups): return {rollout.rollout_id: float(next(calls)) for group in groups for rollout in group}
def others(groups): return {"nobody": 1.0}

class Centered(AdvantageEstimator):
    streams = True
    def advantages(self, inputs):
        groups = inputs.groups
        rewards = groups.rewards_N
        means = np.array([rewards[groups.groups_N == group].mean() for group in groups.groups_N])
        return {rollout.rollout_id: float(value) for rollout, value in zip(groups.rollouts_N, rewards - means)}

class AcrossGroups(Centered):
    def advantages(self, inputs):
        mean = inputs.groups.rewards_N.mean()
        return {rollout.rollout_id: float(rollout.reward - mean) for rollout in inputs.groups.rollouts_N}

class NotANumber(Centered):
    def advantages(self, inputs):
        return {rollout.rollout_id: math.nan for rollout in inputs.groups.rollouts_N}

class Clipped(PolicyLoss):
    def token_loss(self, logprobs_N, old_N, inputs):
        ratio_N = (logprobs_N - old_N).exp()
        clipped_N = (ratio_N - 1).abs() > 0.2
        return TokenLoss(-inputs.advantages_N * torch.where(clipped_N, ratio_N.detach(), ratio_N), clipped_N)

class Detached(Clipped):
    def token_loss(self, logprobs_N, old_N, inputs):
        return super().token_loss(logprobs_N.detach(), old_N, inputs)

class Logarithm(Clipped):
    def token_loss(self, logprobs_N, old_N, inputs):
        return TokenLoss(-inputs.advantages_N * (logprobs_N - old_N).abs().sqrt(), torch.zeros_like(old_N).bool())

class CountsClipped(Clipped):
    def token_loss(self, logprobs_N, old_N, inputs):
        return TokenLoss(-inputs.advantages_N * logprobs_N, torch.ones_like(old_N).bool())

class OneNumber(Clipped):
    def token_loss(self, logprobs_N, old_N, inputs):
        return logprobs_N.sum()

class Watch(agentrl.Callback):
    def on_rollouts(self, run, rollouts): self.count = len(rollouts)
    def on_step(self, run, metrics): return {"mine/rollouts": self.count}
    def on_eval(self, run, step, metrics): run.stop("enough")

class Taken(agentrl.Callback):
    def on_step(self, run, metrics): return {"train/loss": 1.0}
"""


def rollouts() -> list[Rollout]:
    """Two tasks with two rollouts each, and a rollout that the failure policy dropped."""
    pieces = [(*OBSERVED, [5, 9]), (*SAMPLED, [7, 5, 7]), (*OBSERVED, [3]), (*SAMPLED, [1])]
    recorded = [
        build(pieces[: 2 + 2 * (number % 2)], number, f"p{number // 2}", reward=float(number)) for number in range(4)
    ]
    return [*recorded, build(pieces, 4, "p1", dropped=True)]


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def check(folder: Path, *settings: str) -> list[FunctionReport]:
    step = RecordedStep(folder, 3, rollouts(), {"train/loss": 0.5, "eval/reward": 0.4})
    return asyncio.run(check_functions(load_config(None, [*settings]), step))


@pytest.mark.parametrize(
    ("setting", "seen"),
    [
        ("reward={}:reward", ["4 rollouts scored 2.875 in the mean, from 2.75 to 3;"]),
        ("reward.functions={{a: {{function: '{}:reward'}}}}", ["4 rollouts scored 2.875"]),
        ("reward={}:counts", ["4 rollouts were scored differently the second time"]),
        ("reward={}:flat", ["all rewards are equal"]),
        ("rollout.filter_groups.filters=[{}:keep]", ["drops 1 of 2 groups"]),
        ("algo.advantage.name={}:Centered", ["14 trained tokens with advantages from -0.5 to 0.5"]),
        (
            "batch.convert={}:convert",
            ["keeps 3 of 4 samples, and masks 10% of their tokens", "rewards 9 tokens", "weighs tokens from 2 to 2"],
        ),
        ("rollout.buffer_filter={}:newest", ["takes 2 of 2 tasks, in another order"]),
        ("eval.function={}:best_of", ["plays 4 episodes and the sets, and returns eval/best=3"]),
        ("algo.reward_post_process={}:halves", ["4 rewards from 0 to 1.5, 0.75 in the mean; recorded were 1.5"]),
        ("algo.loss.name={}:Clipped", ["at the sampler's policy: ", "at random ratios around it: "]),
        ("train.callbacks=[{}:Watch]", ["adds mine/rollouts=5", "stops the run: enough"]),
    ],
)
def test_what_a_function_does_is_reported(functions: Path, setting: str, seen: list[str]) -> None:
    [report] = check(functions.parent, setting.format(functions))
    assert report.faults == []
    for text in seen:
        assert any(text in line for line in report.lines), report.lines


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("reward={}:text_reward", "4 rollouts: "),
        ("reward={}:raises", "'missing'"),
        ("reward={}:no_such_name", "has no 'no_such_name'"),
        ("rollout.filter_groups.filters=[{}:drop_all]", "it drops every group"),
        ("rollout.filter_groups.filters=[{}:no_bool]", "must return True (drop the group) or False"),
        ("algo.advantage.name={}:AcrossGroups", "set streams=False"),
        ("algo.advantage.name={}:NotANumber", "is not finite"),
        ("rollout.buffer_filter={}:no_task", "it takes no task"),
        ("rollout.buffer_filter={}:all_tasks", "returned 2 tasks; it may return 1 at most"),
        ("rollout.buffer_filter={}:one_argument", "must take 2 arguments, def one_argument(buffer, num_samples)"),
        ("eval.function={}:plays_nothing", "it plays no episode"),
        ("eval.function={}:taken_name", "which the sets have already"),
        ("eval.function={}:no_mapping", "returned None; it must return a mapping of metrics"),
        ("batch.convert={}:unmask", "mask_T of row 0 has 2 tokens that were not trained before"),
        ("batch.convert={}:write_ids", "read-only"),
        ("batch.convert={}:replace_row", "it replaces the sampled tokens of 1 rollouts"),
        ("batch.convert={}:mask_all", "it leaves no token to train on"),
        ("batch.convert={}:nothing", "it leaves no token to train on"),
        ("batch.convert={}:rollouts_only", "it must return a sequence of the samples that it got"),
        ("batch.convert={}:twice", "twice; each sample may be returned once"),
        ("batch.convert={}:random_weights", "it converts the same samples differently the second time"),
        ("batch.convert={}:reward_context", "reward_T of row 0 has a reward at a token that is not trained"),
        ("batch.convert={}:coroutine", "is a coroutine; write def coroutine(samples)"),
        ("batch.convert={}:random", "has no 'random'"),
        ("algo.reward_post_process={}:first_group", "returned no reward for rollout"),
        ("algo.reward_post_process={}:infinite", "returned the reward inf"),
        ("algo.reward_post_process={}:too_large", "returned the reward 1000"),
        ("algo.reward_post_process={}:counted", "other rewards for the same rollouts the second time"),
        ("algo.reward_post_process={}:others", "returned a reward for 'nobody', which is no rollout_id"),
        ("algo.reward_post_process={}:calls", "and no function; write def calls(groups)"),
        ("algo.loss.name={}:Detached", "the loss has no gradient"),
        ("algo.loss.name={}:Logarithm", "at the sampler's policy, the gradient of 14 tokens is not finite"),
        ("algo.loss.name={}:CountsClipped", "14 tokens have a gradient and count as clipped"),
        ("algo.loss.name={}:OneNumber", "token_loss returned Tensor for 14 tokens"),
        ("train.callbacks=[{}:Taken]", "which the step has already"),
    ],
)
def test_a_broken_contract_is_named(functions: Path, setting: str, fault: str) -> None:
    [report] = check(functions.parent, setting.format(functions))
    assert any(fault in line for line in report.faults), report


ROWS = "".join(f'{{"prompt": "{number} + 1?"}}\n' for number in range(20))


@pytest.mark.parametrize(
    ("name", "seen", "fault"),
    [
        ("InOrder", "12 different tasks among the 12 of 3 steps", None),
        ("Forgets", "", "after load_state(state()) task 1 is"),
        ("NoJson", "", "state() returned what JSON cannot hold"),
        ("AtRandom", "", "two data sources with run.seed=0 return other tasks in step 1"),
        ("TooFew", "", "get_samples(4) must return a sequence of 4 Tasks"),
        ("Centered", "", "and no subclass of agentrl.DataSource"),
    ],
)
def test_a_data_source_is_tried_on_the_tasks_of_the_run(
    functions: Path, name: str, seen: str, fault: str | None
) -> None:
    rows = functions.parent / "rows.jsonl"
    rows.write_text(ROWS)
    settings = [f"tasks.data_source.name={functions}:{name}", f"data.path={rows}", "env.name=single_turn"]
    [report] = check(functions.parent, *settings, "rollout.batch_size=4")
    assert any(seen in line for line in report.lines) or fault
    assert (report.faults == []) == (fault is None)
    assert fault is None or any(fault in line for line in report.faults), report


@pytest.mark.parametrize(
    ("name", "seen", "fault"),
    [
        ("loop", "8 rollouts of 4 tasks with recorded replies: 2 turns", None),
        ("with_tools", "not played, as it calls tools of servers (search)", None),
        ("silent", "", "the policy says nothing: call chat.sample()"),
        ("no_rollout", "", "it must return chat.rollout(...)"),
        ("fails", "", "raised ValueError: no plan (functions.py:"),
        ("no_reward", "", "nan"),
        ("one_parameter", "", "must take two arguments, async def generate(task, agent)"),
    ],
)
def test_a_loop_is_tried_with_recorded_replies(functions: Path, name: str, seen: str, fault: str | None) -> None:
    rows = functions.parent / "rows.jsonl"
    rows.write_text(ROWS)
    settings = [f"rollout.generate={functions}:{name}", f"data.path={rows}", "env.name=single_turn"]
    [report] = check(functions.parent, *settings, "rollout.n_samples_per_prompt=2")
    assert (report.faults == []) == (fault is None), report
    assert fault is not None or any(seen in line for line in report.lines), report
    assert fault is None or any(fault in line for line in report.faults), report


@pytest.mark.parametrize(
    ("file", "setting", "seen"),
    [
        ("my_samples.py", "batch.convert={}:convert", "keeps 4 of 4 samples"),
        ("my_buffer.py", "rollout.buffer_filter={}:hardest", "takes 2 of 2 tasks"),
        (
            "my_evaluation.py",
            "eval.function={}:evaluate",
            "plays 16 episodes and the sets, and returns eval/best_of_8=2",
        ),
        ("my_post_process.py", "algo.reward_post_process={}:ranks", "4 rewards from -1 to 1, 0 in the mean"),
    ],
)
def test_the_examples_of_the_page_keep_their_contracts(tmp_path: Path, file: str, setting: str, seen: str) -> None:
    (tmp_path / file).write_text(example(file, SOURCES_PAGE if file == "my_buffer.py" else PAGE))
    [report] = check(tmp_path, setting.format(tmp_path / file))
    assert report.faults == []
    assert any(seen in line for line in report.lines), report.lines


def test_the_command_tries_the_functions_of_a_run_and_of_its_settings(
    functions: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = functions.parent / "run"
    recorder = RolloutRecorder(run / "rollouts")
    for step in (1, 2):
        recorder.write(step, rollouts())
        recorder.finish(step, {})
    (run / "config.yaml").write_text(f"reward: {{function: '{functions}:reward'}}\n")
    assert main(["check", str(run)]) == DONE
    assert "reward.function=" in capsys.readouterr().out
    assert main(["check", str(run), f"algo.loss.name={functions}:Detached"]) == FAILED
    output = capsys.readouterr()
    assert "fault: at the sampler's policy, the loss has no gradient" in output.out
    assert f"2 faults on the rollouts of step 2 of {run}" in output.err
    assert main(["check", str(run), "reward.function=null"]) == USER_MISTAKE
    assert "no function to try" in capsys.readouterr().err
    assert main(["check", str(run), "--step", "7"]) == USER_MISTAKE
    assert "has rollouts of the steps 1, 2" in capsys.readouterr().err
