"""A run that trains two policies, an adapter a role, and what is made of its checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from agentrl_envs.kuhn_poker.tree import KuhnTree
from engine_tiny import reference_logprobs
from requires import requires
from shared_runs import ONE_THREAD, Services, agentrl, here
from transformers import PreTrainedModel

from agentrl import Message
from agentrl.config.learner import LoraConfig
from agentrl.models.load import load_model, load_tokenizer
from agentrl.models.peft_folder import read_peft, write_peft
from agentrl.models.resolve import resolve_model
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.self_play.game_scores import Strategy, exploitability, legal_actions

pytestmark = [pytest.mark.slow, requires("peft")]
WORDS = [
    *ONE_THREAD,
    "env.name=solver_critic",
    "env.roles.solver.policy=solver",
    "env.roles.critic.policy=critic",
    "learner.lora.rank=4",
    "learner.optimizer.lr=1e-2",
    "learner.precision=float32",  # the sampler computes in float32, and a test compares with it
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
    adapters_by_policy = {name: read_peft(checkpoint / "policies" / name)[1] for name in ("solver", "critic")}
    return {
        policy: torch.cat([tensor.flatten() for name, tensor in adapter_tensors if ".lora_B." in name])
        for policy, adapter_tensors in adapters_by_policy.items()
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
    actual_adapters = adapters(tmp_path / "run" / "checkpoints" / "step_000001")
    assert all(bool(tensor.any()) for tensor in actual_adapters.values()), "they began as zeros"
    assert not torch.equal(actual_adapters["solver"], actual_adapters["critic"])
    done = agentrl("eval", "--checkpoint", "run", "--json", "eval.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    last, again = metrics[-1], json.loads((tmp_path / "eval.json").read_text())
    assert (again["eval/reward"], again["eval/tokens"]) == (last["eval/reward"], last["eval/tokens"])


def strategy(model: PreTrainedModel, renderer: ChatRenderer, sets: Mapping[Hashable, Sequence[str]]) -> Strategy:
    """Return how a model of transformers plays: the probabilities of the legal moves, each with an end token."""
    moves_by_state = {}
    for where, moves in sets.items():
        prompt = list(renderer.render((Message("user", str(where)),)).token_ids)
        chances = [
            sum(
                math.exp(sum(reference_logprobs(model, prompt, [*renderer.encode(move), end])))
                for end in renderer.end_token_ids
            )
            for move in moves
        ]
        moves_by_state[where] = {move: chance / sum(chances) for move, chance in zip(moves, chances, strict=True)}
    return moves_by_state


def test_exploitability_is_that_of_the_policies_of_the_seats(tmp_path: Path) -> None:
    base, config = resolve_model("multihop-warm"), LoraConfig(rank=4)
    shutil.copytree(base, tmp_path / "one" / "model")
    linears = [(name, module) for name, module in load_model(base).named_modules() if name.endswith("_proj")]
    for number, role in enumerate(("first", "second")):
        torch.manual_seed(number)
        tensors = [
            (f"base_model.model.{layer}.lora_{matrix}.weight", torch.randn(shape) * 0.2)
            for layer, module in linears
            for matrix, shape in (("A", (4, module.in_features)), ("B", (module.out_features, 4)))
        ]
        write_peft(tmp_path / "one" / "policies" / role, config, tensors)
    words = [
        "env.name=kuhn_poker", "env.roles.first.policy=first", "env.roles.second.policy=second", "learner.lora.rank=4",
        "weights.adapters=only", "eval.size=1", "eval.n_samples=1", "rollout.max_turns=3", "rollout.max_tokens=120",
        "sampler.max_new_tokens=4", *ONE_THREAD,
    ]  # fmt: skip
    done = agentrl("eval", "--checkpoint", "one", "--json", "eval.json", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert here("export", "one", "out", "--dtype", "float32", cwd=tmp_path).returncode == 0
    renderer, game = make_renderer(load_tokenizer(base)), KuhnTree()
    strategies = [
        strategy(load_model(tmp_path / "out" / role), renderer, sets)
        for role, sets in zip(("first", "second"), legal_actions(game), strict=True)
    ]
    record = json.loads((tmp_path / "eval.json").read_text())["eval/exploitability"]
    assert record == pytest.approx(exploitability(game, strategies), abs=1e-4)
