"""An environment of the user's own through the command line: the README's file, and a package with an entry point."""

import re
from pathlib import Path

from shared_runs import Services, agentrl, metrics

README = Path(__file__).parents[2] / "README.md"
TINY = [
    "run.dir=run", "train.steps=2", "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "train.eval_first=false",
    "train.eval_every=0", "eval.size=2", "obs.progress=plain", "obs.tensorboard=false",
]  # fmt: skip


def example() -> str:
    match = re.search(r"<!-- example: brief.py -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert match
    return match[1]


def test_the_readmes_environment_trains(tmp_path: Path, services: Services) -> None:
    (tmp_path / "brief.py").write_text(example())
    done = services.agentrl("train", "--env", "brief.py:Brief", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/words"] >= 0 and 0 < row["train/reward"] <= 1 for row in steps)
    assert (tmp_path / "run/checkpoints/step_000002/model/config.json").exists()


def test_an_environment_from_somebodys_package(tmp_path: Path) -> None:
    """The package lies as an installer leaves it: the module, and beside it its metadata with the entry point."""
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    (site / "brief_env-1.0.dist-info").mkdir(parents=True)
    cwd.mkdir()
    (site / "brief_env.py").write_text(example().replace('@register_env("brief")\n', ""))
    (site / "brief_env-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: brief-env\nVersion: 1.0\n")
    (site / "brief_env-1.0.dist-info" / "entry_points.txt").write_text("[agentrl.envs]\nterse = brief_env:Brief\n")
    listed = agentrl("env", "list", cwd=cwd, PYTHONPATH=str(site))
    assert listed.returncode == 0, listed.stderr
    assert "terse" in listed.stdout
    planned = agentrl("train", "--env", "terse", "--dry-run", *TINY, cwd=cwd, PYTHONPATH=str(site))
    assert planned.returncode == 0, planned.stderr
    assert "terse" in planned.stdout
    unknown = agentrl("train", "--env", "ters", "--dry-run", cwd=cwd, PYTHONPATH=str(site))
    assert unknown.returncode == 2
    assert "Did you mean 'terse'?" in unknown.stderr.replace("\n", " ")
