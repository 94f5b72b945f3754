"""python_math through the command line: the shipped policy, a real tool server, code in real sandboxes."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from agentrl_tasks.math_problems.policies import WARM
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, agentrl, here, metrics

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.errors import MissingError
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

pytestmark = pytest.mark.slow

STEPS = 2
PRODUCT = re.compile(r'"code": "print\((\d+) \* (\d+)\)"}}\n</tool_call>')
"""A call whose result is known here."""


@pytest.fixture(scope="module")
def bubblewrap() -> None:
    async def try_it() -> None:
        async with BubblewrapBackend(SandboxConfig()):
            pass

    try:
        asyncio.run(try_it())
    except MissingError as error:
        pytest.skip(f"bubblewrap is not usable here: {error}")


@pytest.fixture(scope="module")
def trained(bubblewrap: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("python_math")
    done = agentrl(
        *("train", *ONE_THREAD, "--env", "python_math", f"model.path={WARM}", "run.dir=run", f"train.steps={STEPS}"),
        *("rollout.batch_size=4", "rollout.n_samples_per_prompt=2", "eval.size=2", "obs.progress=plain"),
        *("obs.tensorboard=false", "sampler.embedded.slots=8"),
        cwd=cwd,
        target=IN_PROCESS_LEARNER,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "run"


def rollouts(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "rollouts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_calls_run_and_are_counted(trained: Path) -> None:
    rows = [row for row in metrics(trained) if "train/reward" in row]
    assert len(rows) == STEPS
    for row in rows:
        assert 0 < row["rollout/tool_calls"] <= 2
        assert 0 <= row["rollout/correct"] <= row["rollout/answered"] <= 1
        assert row["train/reward"] == pytest.approx(row["rollout/correct"])


def test_the_policy_reads_what_its_code_printed(trained: Path) -> None:
    turns = [turn for rollout in rollouts(trained) for turn in rollout["turns"]]
    products = [(actual, turn["observation"]) for turn in turns if (actual := PRODUCT.search(turn["action"]))]
    assert products
    for actual, printed in products:
        assert printed == str(int(actual[1]) * int(actual[2]))


def test_every_episode_is_one_row_and_the_audit_finds_nothing(trained: Path) -> None:
    assert all(len(rollout["rows"]) == 1 for rollout in rollouts(trained))
    done = here("audit", "run", cwd=trained.parent)
    assert done.returncode == 0, done.stdout + done.stderr
