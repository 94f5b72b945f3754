"""What a run keeps of its rollouts: files of rollouts by step, and the journal."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.batch.group_filters import kept_rollouts
from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.staleness import mask_stale, staleness_metrics
from agentrl.train.rollout_source import StepRollouts, TaskPosition


@dataclass(slots=True)
class RunRecords:
    """The two places in which rollouts are kept."""

    recorder: RolloutRecorder
    """Files by step, for users."""
    journal: Journal
    """For a resumed run."""
    mask_older_than: int | None = None
    """``async.mask_older_than``."""
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Of a step that is trained again."""

    @classmethod
    def of_run(cls, config: Config, folder: Path, state: Mapping[str, Any], after: int | None) -> RunRecords:
        """Return the records of a run.

        Args:
            config: of the run.
            folder: of the run.
            state: of the trainer in the checkpoint, or of a new run; see `agentrl.train.trainer.Trainer.state`.
            after: files of later steps are deleted; None keeps all.

        Raises:
            ConfigError: see `Journal`.
        """
        recorder = RolloutRecorder(
            folder / "rollouts", keep=config.obs.rollouts, form=config.obs.rollout_format, resume_after=after
        )
        journal = Journal(
            folder,
            step=state["step"],
            position=TaskPosition(state["position"], tuple(state.get("trained_ahead", ()))),
            keep=config.train.keep,
            save_episodes_s=config.train.save_episodes_s,
            batch_size=config.rollout.batch_size,
            n_samples_per_prompt=config.rollout.n_samples_per_prompt,
            max_staleness=config.asynchronous.max_staleness,
            **_opponents(config),
        )
        return cls(recorder, journal, config.asynchronous.mask_older_than)

    def trained_before(self, step: int) -> StepRollouts:
        """Return the rollouts with which ``step``, which is trained again, was trained before the run was resumed.

        Raises:
            ConfigError: the journal is damaged.
        """
        batch = self.journal.batch(step)
        assert batch is not None, "the step is trained again"
        rollouts = [rollout for position in batch.positions for rollout in self.journal.held(position)]
        filtered = [rollout for position in batch.dropped for rollout in self._filtered(position)]
        self._metrics = {"rollout/from_journal": 1.0} | staleness_metrics(rollouts, step - 1)
        if self.mask_older_than is not None:
            self._metrics["async/masked_share"] = mask_stale(rollouts, step - 1, self.mask_older_than)
        self.recorder.write(step, [*rollouts, *filtered])
        return StepRollouts(rollouts, TaskPosition(batch.first, batch.ahead), filtered, sampled=False)

    def metrics(self) -> dict[str, float]:
        """Return metrics of a step that was trained again since the last call."""
        found, self._metrics = self._metrics, {}
        return found

    def _filtered(self, position: int) -> list[Rollout]:
        """Return the rollouts of a group that was dropped, marked so."""
        group = self.journal.held(position)
        for rollout in kept_rollouts(group):
            rollout.dropped, rollout.filtered = True, self.journal.reason(position)
        return group

    async def trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Record that a step was trained, with the advantages of its rollouts by ``rollout_id``."""
        await asyncio.to_thread(self.recorder.finish, step, advantages)
        await self.journal.trained(step)


def _opponents(config: Config) -> dict[str, int]:
    """Return a checksum of the mix of opponents, if there is self-play: groups keep their opponent while it stays."""
    return {} if config.self_play is None else {"mix": zlib.crc32(json.dumps(config.self_play.mix).encode())}
