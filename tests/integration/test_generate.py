"""``rollout.generate`` through the command line: the loop of its page in a fresh directory, with the real search."""

import json
import re
from pathlib import Path

import pytest
from shared_runs import Services, here, metrics

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "loop.md"


def documented_loop() -> str:
    match = re.search(r"<!-- example: my_loop.py -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert match
    return match.group(1)


def test_a_generate_function_trains(tmp_path: Path, services: Services) -> None:
    (tmp_path / "my_loop.py").write_text(documented_loop())
    done = services.agentrl(
        "train", "--env", "search_r1", "rollout.generate=my_loop.py:generate", "run.dir=run", "train.steps=1",
        "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "train.eval_first=false", "train.eval_every=0",
        "eval.size=8", "obs.progress=plain", "obs.tensorboard=false", cwd=tmp_path, search=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run") if "train/reward" in row] == [1]
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    searched = [rollout for rollout in rollouts if len(rollout["turns"]) > 1]
    assert searched, "no episode searched"
    for rollout in rollouts:
        assert rollout["prompt"].count("Search by <search> query") == 1
        (tokens,) = rollout["rows"]
        assert [version == 0 for version in tokens["versions"]] == [mask == 1 for mask in tokens["mask"]]
        assert tokens["request_ids"] == [f"{rollout['rollout_id']}/{turn}" for turn in range(len(rollout["turns"]))]
    assert "<information>" in searched[0]["turns"][0]["observation"]


def test_a_function_that_cannot_be_used_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "my_loop.py").write_text("def generate(task, agent): ...\n")
    done = here("train", "--env", "search_r1", "rollout.generate=my_loop.py:generate", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.generate=my_loop.py:generate must be a coroutine" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()
