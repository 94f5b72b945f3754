"""Two ranks compute what one computes: every loss and estimator, packed and padded, however micro-batches are cut.

Two processes over gloo compute all batches of this file; one rank in this process computes the same rollouts as one batch.
With context parallelism, two and four processes compute some of them.
The rollouts have several agents and several rows, so that sequences are divided among micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import RowSignals, pack
from agentrl.config.learner import LearnerConfig, LoraConfig
from agentrl.config.load import validate
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.train.step_scores import StepScores, pack_options
from tests.batches import training_step
from tests.integration.rank_processes import run_ranks
from tests.integration.two_ranks import CONFIG, Cases, Found, Work, compute
from tests.unit.algo.ragged import Ragged, make_ragged
from tests.unit.learner.learners import make_model
from tests.unit.learner.test_shared_prefixes import make_batch, make_rows

pytestmark = pytest.mark.slow

WIDE = {"clip_low": 0.9, "clip_high": 9.0}  # so that few ratios of sequences are clipped
ALGOS: dict[str, dict[str, object]] = {
    **{name: {"loss": {"name": name, "options": WIDE if "gspo" in name else {}}} for name in POLICY_LOSSES},
    "dppo, kl": {"loss": {"name": "dppo", "options": {"divergence": "kl"}}},
    **{f"advantages of {name}": {"advantage": {"name": name}} for name in ESTIMATORS},
    "advantages of turns": {"advantage": {"name": "gae", "options": {"step": "turn"}}},
    "gspo of token advantages": {"loss": {"name": "gspo_token", "options": WIDE}, "advantage": {"name": "gae"}},
    "kl": {"kl_coef": 0.3},
    "entropy": {"entropy_coef": 0.3},
    "tokens corrected": {"old_logprobs": "learner", "correction": {"rollout_is_lower": 0.5}},
    "sequences corrected": {
        "old_logprobs": "learner",
        "correction": {"rollout_is": "geometric", "rollout_is_batch_normalize": True, "rollout_rs": ["token_k3"]},
    },
    "gspo, corrected": {
        "loss": {"name": "gspo", "options": WIDE}, "old_logprobs": "learner", "correction": {"rollout_is": "sequence"},
    },
}  # fmt: skip
SHAPES = {
    "packed": {"tokens_per_micro": 128},
    "cut small": {"tokens_per_micro": 48},
    "padded": {"tokens_per_micro": 1},
}
"""Of the batches of two ranks; cases without a sum over sequences have one alone, `test_metamorphic` has the others."""
ONE_BATCH = {"tokens_per_micro": 4096}
AGGREGATIONS = ("token_mean", "sequence_mean", "rollout_mean", "constant")


def data_of(algo: dict[str, object]) -> Ragged:
    """Return rollouts that the estimator of a case can take; the engine's log-probabilities are near those of the model."""
    of_turns = algo.get("advantage", {}).get("name") in ("turn_level", "at_grpo", "agent_norm")
    return make_ragged(11, sizes=(3, 2), agents=1 if of_turns else 2, rewards=(0.0, 1.0, 3.0))


def batch_of(
    algo: dict[str, object], aggregation: str, ranks: int, sizes: dict[str, int]
) -> tuple[object, GlobalBatch]:
    data = data_of(algo)
    batch = {"aggregation": aggregation, "denominator": "all", **sizes}
    config = validate({"algo": algo, "batch": batch, "learner": {"ranks": ranks}, "rollout": {"batch_size": 2}})
    rng = np.random.default_rng(0)
    values, noise = data.random_values(rng), data.random_values(rng, 0.3)
    learner = {row.key: row.logprobs + noise[row.key] for row in data.rows}
    advantages = RunEstimators(config.algo.by_source).advantages("", AdvantageInput(data.groups, values=values))
    correction = StepScores(learner).correction(config.algo.correction, data.groups)
    training = training_step(config, data.groups)
    training.advantages = advantages
    (step,) = training.optimizer_steps()
    old_logprobs = learner if config.algo.old_logprobs == "learner" else None
    signals = RowSignals(advantages, old_logprobs, correction)
    made = pack(training.rows(step.counted), pack_options(config, 0), signals, trained=step.trained, lr_scale=0.0)
    return config.algo, made


CASES = [
    (name, algo, AGGREGATIONS[number % len(AGGREGATIONS)], shape)
    for number, (name, algo) in enumerate(ALGOS.items())
    for shape in SHAPES
    if shape == "cut small" or name == "ppo_clip" or "gspo" in name or name.startswith("sequences")
]


IN_CONTEXT = ("gspo", "dppo, kl", "kl", "entropy")
"""Cases that ranks compute which have a part of each micro-batch; they see no more of the others than that."""
CONTEXTS = {"1 share of 2 ranks": (1, 2), "2 shares of 2 ranks": (2, 2), "1 share of 4 ranks": (1, 4)}
"""Shares of a batch, and the ranks of each."""


def learner_of(shares: int, context_parallel: int) -> LearnerConfig:
    return CONFIG.model_copy(update={"ranks": shares * context_parallel, "context_parallel": context_parallel})


def in_context(shares: int, context_parallel: int) -> tuple[LearnerConfig, Cases]:
    """Return a learner, and cases whose micro-batches are few."""
    of_name = {name: (algo, aggregation) for name, algo, aggregation, shape in CASES if shape == "cut small"}
    cases = [batch_of(*of_name[name], shares, SHAPES["packed"]) for name in IN_CONTEXT]
    tree = make_batch(make_rows(5), share_prefixes=True, tokens=90, shares=shares)
    assert any(micro.shares_prefixes for share in tree.micro for micro in share)
    cases.append((cases[0][0].model_copy(update={"kl_coef": 0.1}), replace(tree, lr_scale=0.0)))
    return learner_of(shares, context_parallel), cases


def of_policies(shares: int) -> tuple[LearnerConfig, Cases]:
    """Return a learner of two policies, and a case of each; adapters of the other one get no gradient."""
    lora = LoraConfig(rank=4, policies=["first", "second"])
    names = {"first": "ppo_clip", "second": "kl"}
    cases = [batch_of(ALGOS[case], "token_mean", shares, SHAPES["packed"]) for case in names.values()]
    of_each = [(algo, replace(batch, policy=name)) for name, (algo, batch) in zip(names, cases, strict=True)]
    return learner_of(shares, 1).model_copy(update={"lora": lora}), of_each


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    folder = tmp_path_factory.mktemp("two_ranks")
    cases = [batch_of(algo, aggregation, 2, SHAPES[shape]) for _, algo, aggregation, shape in CASES]
    return Work(
        make_model(folder / "policy", initializer_range=0.1),
        make_model(folder / "reference", "llama", initializer_range=0.1),
        [(learner_of(2, 1), cases), in_context(1, 2), of_policies(2)],
    )


def found_by(work: Work, folder: Path) -> list[list[Found]]:
    """Return what the ranks of each learner found, by rank."""
    torch.save(work, folder / "work.pt")
    ranks = work.learners[0][0].ranks
    run_ranks("tests.integration.two_ranks:main", folder, ranks, timeout_s=300)
    of_rank = [torch.load(folder / f"found{number}.pt", weights_only=False) for number in range(ranks)]
    return [list(values_of_rank) for values_of_rank in zip(*of_rank, strict=True)]


@pytest.fixture(scope="module")
def of_two(work: Work, tmp_path_factory: pytest.TempPathFactory) -> list[list[Found]]:
    """What two ranks found: each with its share of the batches, then with a part of every micro-batch."""
    return found_by(work, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def of_context(
    work: Work, of_two: list[list[Found]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Found]]:
    """What the ranks of each of the ``CONTEXTS`` found."""
    four = replace(work, learners=[in_context(2, 2), in_context(1, 4)])
    return dict(zip(CONTEXTS, [of_two[1], *found_by(four, tmp_path_factory.mktemp("four"))], strict=True))


@pytest.fixture(scope="module")
def alone(work: Work) -> Iterator[LocalLearnerGroup]:
    algo = work.learners[0][1][0][0].model_copy(update={"kl_coef": 1.0})
    learner = LocalLearnerGroup(work.model, CONFIG, algo, seed=0, reference=work.reference)
    yield learner
    learner.close()


def assert_same(actual: Mapping[str, float], expected: Mapping[str, float], case: str) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == pytest.approx(value, rel=1e-5, abs=1e-6), (case, key)


@pytest.mark.parametrize("name", ALGOS)
def test_two_ranks_have_the_loss_and_the_gradient_of_one(name, of_two, alone):
    of_case = {shape: (algo, aggregation) for one, algo, aggregation, shape in CASES if one == name}
    algo, aggregation = of_case["cut small"]
    config, full_batch = batch_of(algo, aggregation, 1, ONE_BATCH)
    assert len(full_batch.micro[0]) == 1
    expected = compute(alone.rank, config, full_batch)
    assert expected["train/grad_norm"] > 1e-4
    for (one, _, _, shape), actual in zip(CASES, of_two[0][0].metrics, strict=True):
        if one == name:
            assert_same(actual, expected, shape)


def test_two_ranks_have_the_gradient_of_each_policy_of_one(work, of_two):
    config, cases = of_policies(1)
    learner = LocalLearnerGroup(
        work.model, config, cases[0][0].model_copy(update={"kl_coef": 1.0}), seed=0, reference=work.reference
    )
    for number, (algo, full_result) in enumerate(cases):
        expected = compute(learner.rank, algo, full_result)
        assert expected["train/grad_norm"] > 1e-4
        for rank in of_two[2]:
            assert_same(rank.metrics[number], expected, full_result.policy)
    learner.close()


@pytest.mark.parametrize("context", CONTEXTS)
def test_ranks_with_parts_of_micro_batches_have_the_loss_the_gradient_and_the_logprobs_of_one(
    context, of_context, alone
):
    cases = in_context(1, 1)[1]
    ranks = of_context[context]
    assert len(ranks) == math.prod(CONTEXTS[context])
    for number, (algo, full_result) in enumerate(cases):
        expected = compute(alone.rank, algo, full_result)
        assert expected["train/grad_norm"] > 1e-4
        for rank in ranks:
            assert_same(rank.metrics[number], expected, (*IN_CONTEXT, "tree")[number])
    rows = [key for rank in ranks for key in rank.logprobs]
    actual = {key: row for rank in ranks for key, row in rank.logprobs.items()}
    expected = alone.logprobs(cases[-1][1])
    assert sorted(rows) == sorted(expected), "each row comes from one rank"
    for key, row in expected.items():
        np.testing.assert_allclose(actual[key], row, rtol=1e-5, atol=1e-5)


def test_sequences_are_divided_among_the_ranks(work):
    for (_, _, _, shape), (_, batch) in zip(CASES, work.learners[0][1], strict=True):
        assert len(batch.micro) == 2
        assert batch.divided_sequences
        first, second = ({number for micro in share for number in micro.sequences} for share in batch.micro)
        assert first & second, shape
