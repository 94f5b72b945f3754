"""The job of pictures at full size: a small policy learns to answer questions about them, and nothing where they are shuffled."""

import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MINUTES = 10
NOISE = 0.08
"""Three standard errors of the difference of two shares of about 0.15 on 384 pictures."""
GROWTH_GIB = 0.1
"""Host memory that the processes of a run may have more after 50 steps than after ten."""


def train(folder: Path, *words: str) -> tuple[list[dict[str, float]], float]:
    """Return the rows of ``metrics.jsonl``, and the seconds of the command."""
    start = time.monotonic()
    job = ("train", "--env", "geometry", "run.dir=run", "eval.size=384", *words)
    done = agentrl(*job, cwd=folder, timeout=1800, forks=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(folder / "run"), time.monotonic() - start


def gain(name: str, rows: list[dict[str, float]]) -> float:
    first, last = (row["eval/exact_match"] for row in rows if "eval/exact_match" in row)
    print(f"{name}: exact match on held-out pictures {first:.3f} to {last:.3f}", flush=True)
    return last - first


def test_learns_to_see_and_zoom_in_ten_minutes(tmp_path: Path) -> None:
    """Memory of the host stays as it is from the tenth step to the fiftieth."""
    rows, seconds = train(tmp_path)
    print(f"{seconds / 60:.1f} minutes")
    used = {int(row["step"]): row["host_memory/total_gib"] for row in rows if "host_memory/total_gib" in row}
    print({step: round(used[step], 3) for step in sorted(used) if step % 10 == 0})
    assert gain("geometry", rows) >= 0.4
    assert seconds <= MINUTES * 60
    assert used[50] <= used[10] + GROWTH_GIB


def test_ppo_learns_with_a_critic_that_sees(tmp_path: Path) -> None:
    """A run that was resumed in the middle has the weights of one that was not, of the critic too."""
    ppo = ("algo.advantage.name=gae", "train.steps=40", "train.save_every=20")
    rows, seconds = train(tmp_path, *ppo)
    print(f"{seconds / 60:.1f} minutes, explained variance {rows[-2]['train/value_explained_variance']:.3f}")
    assert gain("PPO", rows) >= 0.25
    shutil.copytree(tmp_path / "run", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_000040")
    done = agentrl("train", "--resume", "run.dir=resumed", cwd=tmp_path, timeout=1800, forks=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for model in ("model", "critic/model"):
        whole, resumed = (
            load_file(tmp_path / run / "checkpoints" / "step_000040" / model / "model.safetensors")
            for run in ("run", "resumed")
        )
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_nothing_is_learned_of_shuffled_pictures(tmp_path: Path) -> None:
    rows, _ = train(tmp_path, "tasks.options.shuffle_pictures=true")
    assert gain("pictures shuffled among tasks", rows) <= NOISE
