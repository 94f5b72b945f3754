"""A small policy learns exercises for a shell in containers, by the commands of the taskset's README, with two seeds."""

import subprocess
import sys
from pathlib import Path

import docker
import pytest
from agentrl_tasks.terminal.exercise import IMAGE
from dockerd import DockerHost

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(4 * 3600)]
SEEDS = (1, 2)
GAIN = 0.3


def run_module(name: str, *words: str, cwd: Path) -> None:
    subprocess.run([sys.executable, "-m", name, *words], cwd=cwd, check=True)


def run_agentrl(*words: str, cwd: Path) -> None:
    done = agentrl(*words, cwd=cwd, timeout=2 * 3600, forks=False)
    assert done.returncode == 0, done.stdout + done.stderr


def make_warm_policy(cwd: Path) -> None:
    """Make the model ``warm`` in a folder: a policy trained on demonstrations."""
    run_module("agentrl_tasks.terminal.make_policy", "init", cwd=cwd)
    run_module("agentrl_tasks.terminal", "demonstrate", "chats.jsonl", cwd=cwd)
    options = ("model.path=init", "data.path=chats.jsonl", "sft.out=warm")
    run_agentrl("sft", "--config", "terminal/sft_warm", *options, cwd=cwd)


def train(seed: int, host: DockerHost, cwd: Path) -> tuple[float, float]:
    """Return the mean reward on held-out exercises before and after training."""
    options = ("model.path=warm", "model.warm_start=null", f"containers.hosts=[{host.url}]")
    words = ("--config", "terminal/small", *options, f"run.seed={seed}", f"run.dir=run-{seed}", "obs.progress=plain")
    run_agentrl("train", *words, cwd=cwd)
    before, after = (row["eval/reward"] for row in metrics(cwd / f"run-{seed}") if "eval/reward" in row)
    print(f"seed {seed}: mean reward on held-out exercises {before:.3f} to {after:.3f}", flush=True)
    return before, after


def test_a_small_policy_learns_exercises(dockerd: DockerHost, tmp_path: Path) -> None:
    client = docker.APIClient(base_url=dockerd.url)
    repository, tag = IMAGE.split(":")
    client.tag(dockerd.image, repository, tag)
    client.close()
    make_warm_policy(tmp_path)
    rewards = {seed: train(seed, dockerd, tmp_path) for seed in SEEDS}
    assert all(after - before >= GAIN for before, after in rewards.values()), rewards
