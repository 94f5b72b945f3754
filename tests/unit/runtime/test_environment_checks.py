"""An environment or taskset that cannot work is refused before anything starts, in one line with the author's place."""

from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.core.registry import make_tasks
from agentrl.runtime.checks import check_engine, check_episodes

FILE = """
from agentrl import AsyncEnv, Env, TaskSet

class NoStep(Env):
    pass

class NoAsyncStep(AsyncEnv):
    pass

class Wants(Env):
    def __init__(self, size, color="red"):
        self.size = int(size)
    def step(self, action):
        return (), 0.0, True, False, {}

class Tasks(TaskSet):
    def __init__(self):
        self.rows = open("gone.jsonl")
    def split(self, name):
        return ()

class AwaitsByMistake(Env):
    async def step(self, action):
        return (), 0.0, True, False, {}

number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_env.py").write_text(FILE)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    return f"{tmp_path}/own_env.py"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NoStep", "{}", r"env\.name=\S+:NoStep: NoStep defines no step\(action\)"),
        ("NoAsyncStep", "{}", r"NoAsyncStep defines no astep\(action\)"),
        ("AwaitsByMistake", "{}", r"AwaitsByMistake defines step as a coroutine, .* subclass of agentrl\.AsyncEnv"),
        ("Wants", "{}", r"env\.options: missing a required argument: 'size'; Wants takes: size, color"),
        ("Wants", "{sise: 3}", r"env\.options: .*; Wants takes: size, color"),
        ("Wants", "{size: big}", r"with env\.options=\{'size': 'big'\}: Wants's constructor raised ValueError"),
        ("Wants", "{size: big}", r"\(own_env\.py:12\)$"),
        ("number", "{}", "is no subclass of agentrl.Env"),
    ],
)  # fmt: skip
def test_an_environment_that_cannot_work(file: str, name: str, options: str, message: str) -> None:
    config = load_config(None, [f"env.name={file}:{name}", f"env.options={options}"])
    with pytest.raises(ConfigError, match=message) as raised:
        check_episodes(config)
    assert "\n" not in str(raised.value)


def test_a_taskset_that_cannot_be_built(file: str) -> None:
    message = r"Tasks's constructor raised FileNotFoundError: .*gone\.jsonl' \(own_env\.py:18\)"
    with pytest.raises(ConfigError, match=message):
        make_tasks(f"{file}:Tasks")
    with pytest.raises(ConfigError, match=r"tasks\.name=\S+:number is 3, and no subclass of agentrl\.TaskSet"):
        make_tasks(f"{file}:number")


def test_options_of_another_engine_are_refused_by_name() -> None:
    options = ["sampler.sglang.mem_fraction_static=0.5", "sampler.sglang.tp_size=2"]
    with pytest.raises(
        ConfigError, match=r"sampler\.sglang\.mem_fraction_static, sampler\.sglang\.tp_size with .*=embedded"
    ):
        check_engine(load_config(None, options))
