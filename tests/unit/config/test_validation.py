"""Values of another type or out of range, and keys that do not exist: one line with the key and the value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from typing import Any, Literal, get_args, get_origin

import pytest
from agentrl_tools.judge.options import JudgeOptions
from agentrl_tools.python.service import PythonOptions
from agentrl_tools.shell.service import ShellOptions
from pydantic import BaseModel

from agentrl.config.base import Section
from agentrl.config.load import load_config, validate
from agentrl.config.merging import merge
from agentrl.config.schema import Config
from agentrl.config.validation import parse_section, subsections
from agentrl.core.errors import ConfigError
from agentrl.toolserver.mcp.connection import McpOptions

NUMBERS = {int, float}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("learner.optimizer.lr=true", "learner.optimizer.lr=true: Input should be a valid number or 'auto'"),
        ("learner.optimizer.betas=[true, 0.9]", "learner.optimizer.betas.0=true: Input should be a valid number"),
        ("learner.optimizer.betas=[0.9]", "learner.optimizer.betas=[0.9]: a list of 1 is too short"),
        ("learner.optimizer.betas=[]", "learner.optimizer.betas=[]: a list of 0 is too short"),
        ("sampler.max_running=0", "sampler.max_running=0: Input should be greater than 0 or 'auto'"),
        ("learner.lora.target=5", "learner.lora.target=5: Input should be 'linear' or a valid list"),
        ("train.steps='20'", "train.steps='20': Input should be a valid integer"),
        ("train.steps=1.5", "train.steps=1.5: Input should be a valid integer"),
        ("learner.fp8=yes", "learner.fp8='yes': Input should be a valid boolean"),
        ("learner=5", "learner=5: this is a section and needs keys"),
        ("env=terminal", "env='terminal': this is a section and needs keys; set env.name=terminal"),
        ("model=Qwen/Qwen3-0.6B", "this is a section and needs keys; set model.path=Qwen/Qwen3-0.6B"),
        ("tools={null: {}}", "tools, line 1: a key is text; put it in quotes"),
        ("run.dir=1.50", "run.dir=1.5: this is text; put it in quotes"),
        ("sampler.temperature=1e-7", "sampler.temperature=1e-07: greedy samples of a group are all the same"),
        ("reward.timeout_s=1e10", "reward.timeout_s=10000000000.0: Input should be less than or equal to 1000000000"),
        ("sampler.top_k=-7", "sampler.top_k=-7: -1 keeps all tokens, 1 and more keep so many"),
        ("train.steps.=3", "'train.steps.=3' is not a setting: 'train.steps.' has a name that is empty"),
    ],
)
def test_a_mistake_has_one_line_without_the_types_of_the_program(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, [setting])
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_name_with_dots_is_no_path_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'train\.steps': .* write train: \{steps: …\}$"):
        validate({"train.steps": 5})


def test_a_whole_number_is_text_where_text_is_expected() -> None:
    config = load_config(None, ["run.dir=12345", "env.name=7", "learner.lora.target=[1]", "tasks.options={a: 5}"])
    assert (str(config.run.dir), config.env.name, config.tasks.options) == ("12345", "7", {"a": 5})
    assert load_config(None, ["train.steps=1e2"]).train.steps == 100


def numeric_keys(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Yield every key with a number, and whether it is whole; ``NAME`` stands for names that users choose."""
    for field, info in section.model_fields.items():
        key = f"{prefix}{info.alias or field}"
        arguments = get_args(info.annotation)
        types = [info.annotation, *arguments, *(inner for argument in arguments for inner in get_args(argument))]
        if get_origin(info.annotation) is not Literal:
            for number in NUMBERS.intersection(kind for kind in types if isinstance(kind, type)):
                yield f"{key}.NAME" if get_origin(info.annotation) is dict else key, number
        for subsection in subsections(info.annotation):
            yield from numeric_keys(subsection, f"{key}.NAME." if get_origin(info.annotation) is dict else f"{key}.")


@pytest.mark.parametrize("section", [Config, PythonOptions, ShellOptions, JudgeOptions, McpOptions])
def test_no_time_is_longer_than_threads_can_wait(section: type[Section]) -> None:
    """Also in options of tools, which their servers read."""
    times = [key for key, kind in numeric_keys(section) if kind is float and re.search(r"(_s|seconds)$", key)]
    assert len(times) >= (15 if section is Config else 1)
    for key in times:
        tree: Any = 1e10
        for name in reversed(key.split(".")):
            tree = {name: tree}
        with pytest.raises(
            ConfigError, match=rf"{key}=10000000000\.0: Input should be less than or equal to 1000000000"
        ):
            parse_section(section, tree)


def test_no_number_is_infinite_or_a_boolean_or_text() -> None:
    keys = [(key, kind) for key, kind in numeric_keys() if ".curriculum." not in key]
    assert len(keys) > 120
    values: list[Any] = [float("inf"), float("-inf"), float("nan"), True, "1", 1e300, 1e-300, 10**400, 2**64 + 0.5]
    for value in values:
        trees = {}
        for key, kind in keys:
            if value != 2**64 + 0.5 or kind is int:
                trees[key] = nested(key, [value, value] if key.endswith("betas") else value)
        # One message has most of them; a section that is refused as a whole hides the others, which are tried alone.
        with pytest.raises(ConfigError) as raised:
            validate(reduce(merge, trees.values()))
        refused_together = trees.keys() & {*re.findall(r"(?:^|\s)([\w.]+?)(?:\.0)?=", str(raised.value))}
        assert len(refused_together) > 100
        for key in trees.keys() - refused_together:
            with pytest.raises(ConfigError, match=rf"{key}(\.0)?="):
                validate(trees[key])


def nested(key: str, value: Any) -> Any:
    for name in reversed(key.split(".")):
        value = {name: value}
    return value
