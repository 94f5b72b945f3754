"""A process of trials: a training run whose steps are taken on request, ``python -m agentrl.tune.trial_process FOLDER FD``.

It starts engines and learner once. `HotSettings` are changed between two steps; nothing is evaluated or saved.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from agentrl.config.layers import merge_layers, saved_layers
from agentrl.config.load import validate
from agentrl.config.merging import Tree
from agentrl.config.runners import runner_count
from agentrl.config.schema import Config
from agentrl.core.child_process import exit_with_parent
from agentrl.core.errors import AgentrlError
from agentrl.obs.console import log_to_stderr, make_console
from agentrl.obs.progress import Stopwatch
from agentrl.obs.step_times import StepTimes, StepTracker
from agentrl.train.run import RunExtras, run_training
from agentrl.train.sampling import Sampling
from agentrl.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class HotSettings:
    """Keys that a started run can change between two steps."""

    tokens_per_micro: int
    """``batch.tokens_per_micro``."""
    concurrency: int | None
    """``rollout.concurrency``; None in a run that cannot change it."""

    @classmethod
    def from_config(cls, config: Config) -> HotSettings:
        """Return those of a configuration."""
        fixed = runner_count(config) > 0 or config.asynchronous.max_staleness > 0
        return cls(config.batch.micro_tokens, None if fixed else config.rollout.concurrency)

    def other_keys(self, config: Config) -> Tree:
        """Return the other keys of a configuration, which are those of one process of trials."""
        tree = config.model_dump(mode="json", exclude={"run": {"dir"}})
        del tree["batch"]["tokens_per_micro"]
        if self.concurrency is not None:
            del tree["rollout"]["concurrency"]
        return tree


@dataclass(frozen=True, slots=True)
class TrialRequest:
    """Steps to take."""

    settings: HotSettings
    steps: int
    """Those that are measured."""
    unmeasured: int
    """Those before."""


Reply = StepTimes | str | None
"""A measured step; an error's text, after which the process ends; or None, when the run has started."""


@dataclass(slots=True)
class TrialTrainer(Trainer):
    """Takes the steps that are requested, until the other end of the connection is closed or sends None."""

    connection: Connection = field(kw_only=True)
    restart_measurement: Callable[[], None] = field(kw_only=True)
    """Leaves out the next step."""

    async def run(self) -> None:
        """Answer requests. Waiting for one blocks the event loop: nothing runs between two of them."""
        await self._sync_weights(Stopwatch())
        self.connection.send(None)
        while (request := self._receive()) is not None:
            self._apply(request.settings)
            for _ in range(request.unmeasured - 1):
                await self._step()
            self.restart_measurement()
            for _ in range(1 + request.steps):  # the first begins the measurement
                await self._step()

    def _receive(self) -> TrialRequest | None:
        with suppress(EOFError):
            request: TrialRequest | None = self.connection.recv()
            return request
        return None

    def _apply(self, settings: HotSettings) -> None:
        packing = self.steps.settings.packing
        packing = replace(packing, tokens_per_micro=settings.tokens_per_micro)
        self.steps.settings = replace(self.steps.settings, packing=packing)
        if settings.concurrency is not None:
            assert isinstance(self.source, Sampling), "trials sample"
            self.source.set_concurrency(settings.concurrency)


def main() -> None:
    """Run the configuration in the folder of the first argument, and answer on the file descriptor of the second."""
    exit_with_parent()
    log_to_stderr()
    folder, connection = Path(sys.argv[1]), Connection(int(sys.argv[2]))
    config = validate(merge_layers(saved_layers(folder)))
    tracker = StepTracker(connection.send)
    trainer = partial(TrialTrainer, connection=connection, restart_measurement=tracker.restart)
    try:
        asyncio.run(run_training(config, make_console(), extras=RunExtras([tracker], make_trainer=trainer)))
    except AgentrlError as error:
        with suppress(OSError):  # the command has closed it
            connection.send(f"{type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
