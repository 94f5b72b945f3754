"""A run of two environments, each with its tasks, reward, estimator and loss."""

import json
from pathlib import Path

import pytest
import yaml
from shared_runs import Services, here, metrics

from agentrl.obs.rollouts import read_rollouts

SOURCES = {
    "search": {
        "weight": 3,
        "env": {"name": "search_r1", "options": {"topk": 2, "max_searches": 4}},
        "tasks": {"name": "multihop"},
        "rollout": {"max_turns": 5, "max_tokens": 640},
        "algo": {"loss": {"name": "gspo"}},
    },
    "short": {
        "env": {"name": "short.py:Short"},
        "data": {"path": "short.jsonl", "eval_path": "short.jsonl", "streaming": True, "convert": "short.py:even"},
        "reward": {"function": "short.py:doubled"},
        "rollout": {"max_turns": 1, "max_tokens": 256},
        "algo": {"advantage": {"name": "reinforce_plus_plus"}, "loss": {"name": "cispo"}},
    },
}
CONFIG = {
    "run": {"dir": "run"},
    "model": {"path": "multihop-warm"},
    "sampler": {"backend": "embedded", "max_new_tokens": 32, "embedded": {"slots": 32, "context": 768}},
    "rollout": {"batch_size": 4, "n_samples_per_prompt": 4},
    "train": {"steps": 1, "eval_first": False},
    "eval": {"size": 2},
    "obs": {"progress": "plain", "tensorboard": False},
    "sources": SOURCES,
}
ENVIRONMENT = """
from agentrl import Env


class Short(Env):
    def step(self, action):
        assert self.task.id.startswith("short/")
        return (), 1.0 / (1 + len(action.content)), True, False, {"metrics": {"length": float(len(action.content))}}


def even(row):
    return row if row["n"] % 2 == 0 else None


def doubled(sample):
    return 2 + 1 / (1 + len(sample.final))
"""
ROWS = "".join(json.dumps({"prompt": f"Say {n}.", "n": n}) + "\n" for n in range(6))


@pytest.mark.long
def test_two_environments_are_trained_in_one_step(tmp_path: Path, services: Services) -> None:
    (tmp_path / "short.py").write_text(ENVIRONMENT)
    (tmp_path / "short.jsonl").write_text(ROWS)
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(CONFIG))
    done = services.agentrl("train", "--config", "mixed.yaml", cwd=tmp_path, search=True)
    assert done.returncode == 0, done.stdout + done.stderr
    step, evaluation = metrics(tmp_path / "run")
    assert (step["rollout/search/episodes"], step["rollout/short/episodes"]) == (12.0, 4.0)
    assert step["rollout/short/turns"] == 1.0
    assert 2 < step["train/short/reward"] < 4 > step["train/search/reward"]
    assert step["data/short/left_out"] > 0
    assert step["rollout/search/searches"] > 0
    assert "rollout/search/length" not in step
    assert step["batch/short/live_share"] == 1.0, "token by token, so that no group is flat"
    assert step["train/optimizer_steps"] == 1.0
    assert evaluation["eval/search/episodes"] == evaluation["eval/short/episodes"] == 2.0
    [task] = {
        rollout.prompt_id
        for rollout in read_rollouts(tmp_path / "run/rollouts/step_000001.jsonl")
        if rollout.prompt_id[:2] == "sh"
    }
    shown = here("view", "run", "--group", task, "--limit", "1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    refused = here("train", "--resume", "run.dir=run", "sources.short.weight=2", cwd=tmp_path)
    assert refused.returncode == 2
    assert "sources.short.weight=2.0: the run in run has null" in refused.stderr.replace("\n", " ")
