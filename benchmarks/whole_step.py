"""``agentrl bench step``: the whole training loop of a configuration, and where the time of its steps goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.config.schema import Config
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.obs.step_times import StepTimes, StepTracker
from agentrl.train.preflight import check_run
from agentrl.train.run import RunExtras, RunStart, run_training
from benchmarks.concurrency import start_scripted_engine

SCRIPTED: Mapping[str, Any] = {"algo": {"entropy_coef": 1e-6}}
"""Random turns have no reward that differs: with an entropy bonus their tokens are trained all the same."""


def scripted_settings(exits: ExitStack, folder: Path, config: Config, delay_s: float) -> dict[str, Any]:
    """Start a scripted engine, which ``exits`` ends, and return the settings with which a run uses it.

    Raises:
        EngineError: it does not start.
    """
    vocabulary = read_vocab_size(resolve_model(config.model.path))
    url = start_scripted_engine(exits, folder / "engine.log", vocabulary, delay_s)
    return {"sampler": {"backend": "sglang", "url": url}, **SCRIPTED}


def run_steps(config: Config, console: Console, on_step: Callable[[StepTimes], None]) -> None:
    """Train, and measure each step but the first.

    Raises:
        ConfigError: the run cannot start; see `check_run`.
        AgentrlError: it failed.
    """
    contents = check_run(config).contents
    asyncio.run(run_training(config, console, RunStart(contents=contents), RunExtras([StepTracker(on_step)])))
