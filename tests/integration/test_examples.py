"""Every folder of examples/ runs by its own command, here for a small step, and says what to expect of all of them."""

import asyncio
import json
import math
import re
import shlex
import shutil
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from byte_renderer import byte_renderer
from shared_runs import Services, here, metrics

from agentrl.config.load import load_config, read_yaml
from agentrl.core.registry import env_class, make_env, make_tasks
from agentrl.sft.demonstrate import demonstrate
from agentrl.testing import check_env

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["train.steps=1", "rollout.batch_size=2", "rollout.n_samples_per_prompt=2", "eval.size=2"]
SMALL += ["run.dir=run", "obs.progress=plain", "obs.tensorboard=false"]

WARM_START = "{sft: {steps: 2, epochs: null, batch_size: 4, workers: 0}, learner: {threads: 1}}"
"""Changes of the warm start's configuration."""

LOGS = {
    "01_own_reward": ("right_name", "right_thought"),
    "02_own_environment": ("right", "reached"),
    "03_own_tool": ("right", "calls", "refused"),
    "04_own_generate": ("right", "chats"),
    "05_own_documents": ("exact_match", "searches"),
    "06_own_algorithm": ("exact_match", "searches"),
    "07_mcp_tools": ("right", "calls", "refused"),
    "08_own_chats": ("right",),
    "09_agent_program": ("right", "pages"),
}
"""The figures that an example's own code gives, by its folder."""

LIKE_OTHERS = (
    "01_own_reward", "02_own_environment", "03_own_tool", "04_own_generate", "05_own_documents", "08_own_chats",
    "09_agent_program",
)  # fmt: skip
"""Those whose parts are trained elsewhere in `make test`; `make test-long` runs them."""

SEARCHES = ("04_own_generate", "06_own_algorithm")
"""Those that search the documents of the shipped taskset; all others run without a search server or start their own."""


def readme(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


def command(name: str) -> list[str]:
    """The words of the first command in an example's README, without ``agentrl``."""
    match = re.search(r"^agentrl (train .*)$", readme(name), re.MULTILINE)
    assert match, f"{name}/README.md shows no command"
    return shlex.split(match[1], comments=True)


def test_every_example_is_run_here() -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_dir()} == set(LOGS)


@pytest.mark.parametrize("name", LOGS)
def test_it_states_the_result_to_expect(name: str) -> None:
    _, heading, expected = readme(name).partition("\n## What to expect\n")
    assert heading, f"{name}/README.md has no heading 'What to expect'"
    figures = re.findall(r"\b0\.\d+|\b1\.0+", expected)
    assert len(figures) >= 2, "a figure before training and one after it"
    assert command(name)[-1] in (EXAMPLES / name / "config.yaml").read_text().splitlines()[0]


@pytest.mark.parametrize(
    "reference",
    [
        "02_own_environment/env.py:Trail",
        "03_own_tool/registry_env.py:Registry",
        "07_mcp_tools/mcp_env.py:McpEnv",
        "08_own_chats/words_env.py:Words",
        "09_agent_program/page_env.py:PageEnv",
    ],
)
def test_its_environment_keeps_the_contract(reference: str) -> None:
    check_env(env_class(str(EXAMPLES / reference)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LIKE_OTHERS else name for name in LOGS]
)
def test_it_runs(name: str, tmp_path: Path, services: Services) -> None:
    cwd = tmp_path / name
    shutil.copytree(EXAMPLES / name, cwd, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    short = [f"model.warm_start_options={WARM_START}"] if name == "08_own_chats" else []
    if (chats := cwd / "chats.jsonl").exists():
        chats.write_text("".join(chats.read_text().splitlines(keepends=True)[:60]))
    done = services.agentrl(*command(name), *SMALL, *short, cwd=cwd, search=name in SEARCHES)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(cwd / "run")
    steps = [row for row in rows if "train/reward" in row]
    assert [row["step"] for row in steps] == [1]
    for row in steps:
        assert all(math.isfinite(value) for value in row.values())
        assert 0 <= row["train/reward"] <= 1
        assert {f"rollout/{figure}" for figure in LOGS[name]} <= set(row)
    assert [row["step"] for row in rows if "eval/reward" in row] == [0, 1]
    if name == "09_agent_program":
        check_agent_program(cwd / "run")


def test_a_warm_start_teaches_what_the_agent_program_does() -> None:
    """SmolLM2's warm start has the program's prompt, and its demonstrations earn what the program's reward gives."""
    folder = EXAMPLES / "09_agent_program"
    files = {
        name: read_yaml(folder / name)
        for name in ("config.yaml", "environment.yaml", "smollm2.yaml", "smollm2_sft.yaml")
    }
    prompts = {content["rollout"]["agent"]["prompt"] for content in files.values() if "agent" in content["rollout"]}
    prompts |= {content["env"]["options"]["prompt"] for content in files.values() if "options" in content["env"]}
    assert len(prompts) == 1
    assert load_config(folder / "smollm2.yaml").model.warm_start == "smollm2_sft.yaml"
    config = load_config(
        folder / "smollm2_sft.yaml",
        [f"tasks.name={folder}/page_tasks.py:Pages", f"env.name={folder}/page_env.py:PageEnv"],
    )
    assert config.tasks.name is not None
    tasks = make_tasks(config.tasks.name)
    renderer = byte_renderer("{% for m in messages %}{{ m.content }}{% endfor %}")
    rng = np.random.default_rng(0)

    async def rewards() -> list[float]:
        env = partial(make_env, config.env.name, config.env.options)
        demonstrations = [
            await demonstrate(
                env, task, tasks.demonstrator(task, rng), seed=0, tool_clients={}, renderer=renderer, max_turns=4
            )
            for task in islice(tasks.split("train"), 60)
        ]
        return [demonstration.reward for demonstration in demonstrations]

    counts = Counter(asyncio.run(rewards()))
    assert set(counts) == {0.25, 1.0}
    assert counts[0.25] > counts[1.0] > 5


def check_agent_program(run: Path) -> None:
    """Check that what its requests sampled is one row of each rollout, and that nothing of the programs is left."""
    rollouts = [json.loads(line) for line in (run / "rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 4
    for rollout in rollouts:
        assert rollout["failure"] is None
        (row,) = rollout["rows"]
        assert sum(row["mask"]) == rollout["sampled_tokens"] > 0
        assert len(row["request_ids"]) == len(rollout["turns"])
        assert not Path(rollout["metadata"]["agent_folder"]).exists()
    audited = here("audit", str(run), cwd=run)
    assert audited.returncode == 0, audited.stdout + audited.stderr
