"""Short variants of tutorials 3 and 4, which use the files of tutorial 2; ``tests/long/test_tutorials.py`` runs all whole."""

import json
import re
import runpy
from pathlib import Path

import pytest
from shared_runs import Services, metrics

from agentrl.config.load import load_config
from tests.requires import require_bubblewrap
from tests.test_commands import TUTORIALS

SMALL = [
    "train.steps=1",
    "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=4",
    "eval.size=2",
    "obs.tensorboard=false",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files of all tutorials."""
    for page in TUTORIALS.glob("*.md"):
        for name, content in re.findall(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", page.read_text(), re.DOTALL):
            (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.long
def test_the_tool_searches_in_a_sandbox(folder: Path, services: Services) -> None:
    require_bubblewrap()
    words = ["--config", "directory.yaml", "--env", "sandboxed_env.py:SandboxedDirectory", "run.dir=run", *SMALL]
    done = services.agentrl("train", *words, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (folder / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    pages = [turn for rollout in rollouts for turn in rollout["turns"] if "works for" in turn["observation"]]
    assert pages, "a call found a page"
    assert all(rollout["failure"] is None for rollout in rollouts)
    assert [row["step"] for row in metrics(folder / "run") if "train/reward" in row] == [1]


def test_questions_of_the_agent_program_are_those_of_its_configuration(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    runpy.run_path("make_questions.py")
    config = load_config(folder / "agent.yaml", [])
    for path, count in ((config.data.path, 500), (config.data.eval_path, 100)):
        assert path is not None
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        assert len(rows) == count
        assert all({config.data.input_key, config.data.label_key, config.data.metadata_key} == {*row} for row in rows)
