"""Learner backends by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.learner import LearnerConfig
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, UnknownNameError
from agentrl.learner.fsdp.backend import FsdpBackend
from agentrl.learner.registry import make_backend
from agentrl.train.preflight import plan_run
from agentrl.train.step_scores import pack_options

BACKEND = """
from agentrl.core.errors import ConfigError
from agentrl.learner.base import LearnerBackend

class PairBackend(LearnerBackend):
    data_parallel_size = property(lambda self: self.config.ranks // 2)

    def check(self, algo, models):
        if self.config.ranks % 2:
            raise ConfigError(f"learner.ranks={self.config.ranks}: two ranks compute a share; set an even number")

    def rank_class(self):
        raise AssertionError("no rank is wanted here")

class Unfinished(LearnerBackend):
    data_parallel_size = 1
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "pair_backend.py"
    file.write_text(BACKEND)
    return file


def test_a_backend_of_agentrl() -> None:
    config = LearnerConfig(ranks=3)
    backend = make_backend(config)
    assert isinstance(backend, FsdpBackend)
    assert (backend.config, backend.data_parallel_size) == (config, 3)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownNameError,
        match=r"unknown learner backend 'fsdp1' \(learner\.backend\)\. Did you mean 'fsdp'\? Known: .*fsdp",
    ):
        make_backend(LearnerConfig(backend="fsdp1"))


def test_batches_have_the_data_parallel_size_of_the_backend(file: Path) -> None:
    config = load_config(None, [f"learner.backend={file}:PairBackend", "learner.ranks=6"])
    assert pack_options(config, 0).data_parallel_size == 3


def test_a_configuration_is_checked_before_the_start(file: Path) -> None:
    settings = [f"learner.backend={file}:PairBackend", "learner.ranks=3"]
    with pytest.raises(ConfigError, match=r"learner\.ranks=3: two ranks"):
        plan_run(load_config(None, settings))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("BACKEND", "has no 'BACKEND'; it has: .*PairBackend"),
        ("ConfigError", "is no subclass of agentrl.learner.base.LearnerBackend"),
        ("Unfinished", "Unfinished does not implement check, rank_class"),
    ],
)
def test_a_class_that_is_no_backend(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(LearnerConfig(backend=f"{file}:{name}"))
