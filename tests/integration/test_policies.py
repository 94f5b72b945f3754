"""A run that trains two policies, an adapter a role, and what is made of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from shared_runs import ONE_THREAD, Services, agentrl

from agentrl.models.peft_folder import read_peft

pytest.importorskip("peft")
WORDS = [
    *ONE_THREAD,
    "env.name=solver_critic",
    "env.roles.solver.policy=solver",
    "env.roles.critic.policy=critic",
    "learner.lora.rank=4",
    "learner.optimizer.lr=1e-2",
    "weights.adapters=only",
    "weights.check=checksum",
    "algo.advantage.name=rae",
    "algo.entropy_coef=0.1",
    "sampler.max_new_tokens=4",
    "rollout.max_tokens=200",
    "rollout.max_turns=4",
    "rollout.batch_size=4",
    "rollout.n_samples_per_prompt=2",
    "model.path=multihop-warm",
    "train.eval_every=0",
    "train.eval_first=false",
    "eval.size=2",
    "eval.n_samples=1",
    "obs.tensorboard=false",
    "obs.progress=plain",
]


def adapters(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the matrices B of each policy, in one line."""
    found = {name: read_peft(checkpoint / "policies" / name)[1] for name in ("solver", "critic")}
    return {
        policy: torch.cat([tensor.flatten() for name, tensor in each if ".lora_B." in name])
        for policy, each in found.items()
    }


def test_both_policies_change_and_differ_and_a_checkpoint_is_evaluated_with_them(
    tmp_path: Path, services: Services
) -> None:
    run = services.agentrl("train", *WORDS, "run.dir=run", "train.steps=1", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [row] = [row for row in metrics if "train/loss" in row]
    assert row["train/optimizer_steps"] == 2
    for policy in ("solver", "critic"):
        assert row[f"train/reward/role={policy}"] <= 0
        assert row[f"train/sampler_gap_max/policy={policy}"] < 1e-3
    found = adapters(tmp_path / "run" / "checkpoints" / "step_000001")
    assert all(bool(tensor.any()) for tensor in found.values()), "they began as zeros"
    assert not torch.equal(found["solver"], found["critic"])
    done = agentrl("eval", "--checkpoint", "run", "--json", "eval.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last, again = metrics[-1], json.loads((tmp_path / "eval.json").read_text())
    assert (again["eval/reward"], again["eval/tokens"]) == (last["eval/reward"], last["eval/tokens"])
