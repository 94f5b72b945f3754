"""Settings from Python: mappings, dotted keys, files, and objects in place of references."""

from __future__ import annotations

import importlib
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.api.python_settings import PythonSettings, new_layers, read_settings
from agentrl.api.settings import load_environment
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.imports import python_objects
from agentrl.core.registry import make_any_env, reward_function
from agentrl.testing import FakeLearner


class Counting(agentrl.Env):
    """An environment of a module: other processes can import it."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def reset(self, task: Any, seed: int | None = None) -> Any:
        raise NotImplementedError

    def step(self, action: Any) -> Any:
        raise NotImplementedError


def score(sample: agentrl.Sample) -> float:
    return 1.0


@agentrl.tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


def settings(**values: object) -> PythonSettings:
    return read_settings(None, values)[1]


def test_sections_dotted_keys_and_short_forms_are_one_tree() -> None:
    values = {
        "train": {"steps": 3},
        "train.keep": 1,
        "env": "search_r1",
        "run": {"dir": Path("runs/x")},
        "learner.optimizer": {"lr": 1},
    }
    assert settings(**values).tree == {
        "train": {"steps": 3, "keep": 1}, "env": {"name": "search_r1"}, "run": {"dir": "runs/x"},
        "learner": {"optimizer": {"lr": 1}},
    }  # fmt: skip
    assert settings(sources={"a": {"env": "x", "reward": "y:z"}}).tree == {
        "sources": {"a": {"env": {"name": "x"}, "reward": {"function": "y:z"}}}
    }
    assert settings(**{"sources.a.reward": None}).tree == {"sources": {"a": {"reward": {"function": None}}}}
    with pytest.raises(ConfigError, match=r"'train\.\.steps' is no key"):
        settings(**{"train..steps": 3})


def test_files_and_whole_configurations(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("train: {steps: 7, keep: 3}\nenv: {name: single_turn}\n")
    files, python = read_settings(file, {"train.keep": 1})
    config = load_environment(new_layers(file, files, python))
    assert (config.train.steps, config.train.keep, config.env.name) == (7, 1, "single_turn")
    files, python = read_settings(config, {"train": {"steps": 8}})
    again = load_environment(new_layers(config, files, python))
    assert again.model_dump() == config.model_dump() | {"train": config.train.model_dump() | {"steps": 8}}
    with pytest.raises(ConfigError, match="config=3 is no configuration"):
        read_settings(3, {})  # type: ignore[arg-type]


def test_what_a_module_defines_is_named_by_it() -> None:
    found = settings(env=Counting, reward=score)
    assert found.objects == {}
    assert found.tree["env"] == {"name": f"{__name__}:Counting"}
    assert found.tree["reward"] == {"function": f"{__name__}:score"}


def test_what_only_this_process_has_is_named_by_its_key() -> None:
    found = settings(
        env=lambda start=5: Counting(start),
        reward=lambda sample: 0.25,
        rollout={"filter_groups": {"filters": ["zero_variance", lambda group: True]}},
    )
    assert found.tree["env"]["name"] == "python:env.name"
    assert found.tree["rollout"]["filter_groups"]["filters"] == [
        "zero_variance",
        "python:rollout.filter_groups.filters.1",
    ]
    with python_objects(found.objects):
        first, second = (make_any_env("python:env.name", options) for options in ({}, {"start": 7}))
        assert isinstance(first, Counting)
        assert isinstance(second, Counting)
        assert (first.start, second.start) == (5, 7)
        with pytest.raises(ConfigError, match="takes: start"):
            make_any_env("python:env.name", {"begin": 1})
        assert reward_function("python:reward.function")("x") == 0.25
        keys = recorded_keys(Config.model_validate({"reward": {"function": "python:reward.function"}}))
        assert keys["code of reward.function"], "a resumed run notices that it has changed"
    with pytest.raises(ConfigError, match="is an object of the Python process that began the run"):
        make_any_env("python:env.name", {})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"env": Counting()}, "one environment, and each episode needs its own: give the class"),
        ({"env": lambda: 3}, "returned 3, and no agentrl.Env"),
        ({"tools": {"add": add}}, "add is a tool: environments name theirs"),
        ({"algo": {"loss": {"name": lambda: 0}}}, "^algo.loss.name: .*cannot import it.*Write it to a file"),
        ({"learner.backend": partial(FakeLearner)}, "^learner.backend: .*cannot import it"),
    ],
)
def test_what_cannot_travel_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**values)


def test_runner_processes_cannot_have_objects_of_this_process() -> None:
    found = settings(reward=lambda sample: 1.0, rollout={"runners": 2})
    with pytest.raises(ConfigError, match=r"^rollout.runners=2: episodes run in 2 other .* reward.function \(.*lambda"):
        found.check(Config.model_validate({"rollout": {"runners": 2}}))


def test_importing_agentrl_is_light() -> None:
    """With its names for environments, and without them for the process that keeps an engine."""
    program = (
        "import sys, agentrl.inference.launch.keeper; assert not {'gymnasium', 'jsonschema', 'httpx'} & {*sys.modules}; "
        "from agentrl import Chat, Env, TaskSet, tool; assert not {'torch', 'ray', 'pandas'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_train_stays_a_function_once_the_package_of_that_name_is_imported() -> None:
    importlib.import_module("agentrl.train.callbacks")
    assert "agentrl.train" in sys.modules
    assert agentrl.train.__name__ == "train", agentrl.train
    assert agentrl.train.__module__ == "agentrl.api.training"
    from agentrl import Run, train

    assert callable(train)
    assert isinstance(Run, type)
