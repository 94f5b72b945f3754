"""Several policies, adapters over one base model: each is trained as if it were alone."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from agentrl.cli.main import main
from agentrl.config.learner import LoraConfig
from agentrl.core.errors import CheckpointError, LearnerError
from agentrl.models.load import load_model
from agentrl.models.peft_folder import read_peft, write_peft
from tests.requires import requires
from tests.unit.learner.learners import make_batch, make_rows, tensors

pytestmark = requires("peft")
LORA = {"rank": 4, "alpha": 8}
BOTH = LORA | {"policies": ["first", "second"]}
LENGTHS = [20, 12, 30]


def batch(policy, seed):
    return replace(make_batch(LENGTHS, seed=seed), policy=policy)


def alone(learners, seeds, **options):
    """Return gradients and norms of each step, and the adapters after them, of a policy that is trained alone."""
    learner = learners.open(lora=LORA, max_grad_norm=0.05, **options)
    steps = [step(learner, "main", seed) for seed in seeds]
    return steps, dict(learner.adapters())


def step(learner, policy, seed):
    """Take a step; return metrics and clipped gradients by the names in a PEFT folder."""
    gradients = {}
    states = learner.rank.optimizer_states
    take = type(states).step

    def keep():
        for name, inner in learner.rank.merged.exported[policy].items():
            gradients[name] = learner.rank.merged.adapters[inner].grad.clone()
        other_policies = set(learner.rank.merged.adapters) - set(learner.rank.merged.exported[policy].values())
        assert all(learner.rank.merged.adapters[name].grad is None for name in other_policies)
        take(states)

    states.step = keep
    metrics = learner.train_step(batch(policy, seed))
    del states.step
    return gradients, {key: metrics[key] for key in ("train/loss", "train/grad_norm", "train/lr")}


# The first is contained in the others.
@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.long), {"cpu_offload": "optimizer"}, {"optimizer": {"warmup_steps": 4}}],
)
def test_gradients_and_updates_are_those_of_each_policy_trained_alone(learners, options):
    seeds = {"first": [1, 2], "second": [4]}
    expected = {policy: alone(learners, policy_seeds, **options) for policy, policy_seeds in seeds.items()}
    learner = learners.open(lora=BOTH, max_grad_norm=0.05, **options)
    order = [("first", 1), ("second", 4), ("first", 2)]
    actual = {policy: [] for policy in seeds}
    for policy, seed in order:
        actual[policy].append(step(learner, policy, seed))
    for policy, (steps, adapters) in expected.items():
        for (gradients, metrics), (other_gradients, other_metrics) in zip(steps, actual[policy], strict=True):
            assert metrics == other_metrics
            assert all(torch.equal(gradients[name], other_gradients[name]) for name in gradients)
        mine = dict(learner.adapters(policy=policy))
        assert mine.keys() == adapters.keys()
        assert all(torch.equal(adapters[name], mine[name]) for name in adapters)
    assert any(not torch.equal(dict(learner.adapters(policy="first"))[name], mine[name]) for name in mine)


def test_scores_are_those_of_the_batch_policy(learners):
    learner = learners.open(lora=BOTH)
    logprobs_before = learner.logprobs(batch("first", 1))
    learner.train_step(batch("second", 2))
    logprobs_after, other_logprobs = learner.logprobs(batch("first", 1)), learner.logprobs(batch("second", 1))
    assert all((logprobs_after[key] == logprobs_before[key]).all() for key in logprobs_before)
    assert any((other_logprobs[key] != logprobs_before[key]).any() for key in logprobs_before)
    with pytest.raises(LearnerError, match=r"no policy 'main', only first, second"):
        learner.train_step(make_batch(LENGTHS))


def test_a_checkpoint_has_each_policy_and_goes_on(learners, model, tmp_path):
    learner = learners.open(lora=BOTH)
    start = tensors(learner)
    learner.train_step(batch("first", 1))
    learner.save(tmp_path / "one")
    learner.finish_save()
    adapters_before = {policy: dict(learner.adapters(policy=policy)) for policy in ("first", "second")}
    for policy, adapters in adapters_before.items():
        config, actual = read_peft(tmp_path / "one" / "policies" / policy)
        assert (config["r"], config["lora_alpha"], "q_proj" in config["target_modules"]) == (4, 8, True)
        assert dict(actual).keys() == adapters.keys()
        assert all(torch.equal(tensor, adapters[name]) for name, tensor in actual)
    order = [("second", 2), ("first", 3)]
    straight = [learner.train_step(batch(*batch_options)) for batch_options in order]
    last = dict(learner.adapters(policy="second"))
    learner = learners.open(lora=BOTH)
    learner.train_step(batch("second", 9))  # whose optimizer the checkpoint lacks
    learner.load(tmp_path / "one")
    assert learner.rank.steps == {"first": 1, "second": 0}
    assert [learner.train_step(batch(*batch_options)) for batch_options in order] == straight
    assert all(torch.equal(tensor, last[name]) for name, tensor in learner.adapters(policy="second"))
    assert all(torch.equal(value, start[name]) for name, value in tensors(learner).items()), "none is merged"
    with pytest.raises(CheckpointError, match=r"another shapes: .*lora_A\.second"):
        learners.open(lora=LORA | {"policies": ["first"]}).load(tmp_path / "one")


@pytest.mark.parametrize("policies", [["first", "second"], ["second"]])
def test_each_policy_of_a_checkpoint_is_loaded_by_peft_and_exported_merged(learners, model, tmp_path, policies):
    """Also a single policy with a name: ``model`` is the base model, to which engines add its adapters."""
    import peft

    learner, policy_folder, out = learners.open(lora=LORA | {"policies": policies}), tmp_path / "one", tmp_path / "out"
    for number, policy in enumerate(policies):
        learner.train_step(batch(policy, number))
    learner.save(policy_folder)
    learner.finish_save()
    assert main(["export", str(policy_folder), str(out), "--dtype", "float32"]) == 0
    assert sorted(path.name for path in out.iterdir()) == policies
    [row, *_] = make_rows(LENGTHS, 1)
    ids = torch.tensor(row.token_ids).long()
    seen = []
    for policy in policies:
        adapted = peft.PeftModel.from_pretrained(
            load_model(policy_folder / "model"), policy_folder / "policies" / policy
        )
        seen.append(torch.tensor(learner.logprobs(batch(policy, 1))[row.key][1:]))
        for theirs in (adapted, load_model(out / policy)):
            actual = theirs(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            assert torch.allclose(seen[-1], actual, atol=1e-5)
    kept_state_dict = load_model(policy_folder / "model").state_dict()
    assert all(torch.equal(value, kept_state_dict[name]) for name, value in load_model(model).state_dict().items())
    assert len(policies) == 1 or not torch.allclose(*seen, atol=1e-2)


def test_adapters_of_another_model_are_not_exported(model, tmp_path, capsys):
    another = [(f"base_model.model.model.other.lora_{matrix}.weight", torch.ones(2, 2)) for matrix in "AB"]
    write_peft(tmp_path / "policies" / "first", LoraConfig(rank=2), another)
    shutil.copytree(model, tmp_path / "model")
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 2
    assert "first has adapters of model.other.weight, which" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
