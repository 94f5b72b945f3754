"""Records of a run's rollouts: files by step, and the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.batch.group_filters import kept_rollouts
from agentrl.core.types import Rollout
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.token_ages import mask_stale, staleness_metrics
from agentrl.train.rollout_source import StepRollouts, TaskPosition
from agentrl.train.run_inputs import RunInputs


@dataclass(slots=True)
class RunRecords:
    """The two places in which rollouts are kept."""

    recorder: RolloutRecorder
    """Files by step, for users."""
    journal: Journal
    """For a resumed run."""
    mask_older_than: int | None
    """``async.mask_older_than``."""
    resume_after: int | None
    """Files by step after this one are deleted, as these steps are run again; None deletes none."""
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Of a step that is trained again."""

    @classmethod
    def open(cls, run: RunInputs) -> RunRecords:
        """Return the records of a run, of which nothing is changed before `begin`.

        Raises:
            ConfigError: see `Journal`.
        """
        config = run.config
        recorder = RolloutRecorder(run.folder / "rollouts", keep=config.obs.rollouts, form=config.obs.rollout_format)
        journal = Journal(
            run.folder,
            step=run.step,
            position=run.position,
            keep=config.train.keep,
            save_episodes_s=config.train.save_episodes_s,
            keys=run.keys,
            discard=run.discard,
        )
        return cls(recorder, journal, config.asynchronous.mask_older_than, run.resume_after)

    def begin(self) -> None:
        """Delete what was recorded of steps after the checkpoint, but for what the journal uses again."""
        self.journal.begin()
        if self.resume_after is not None:
            self.recorder.delete_after(self.resume_after)

    def read_step(self, step: int) -> StepRollouts:
        """Return the rollouts with which ``step``, which is trained again, was trained before the run was resumed.

        Raises:
            ConfigError: the journal is damaged.
        """
        batch = self.journal.batch(step)
        assert batch is not None, "the step is trained again"
        rollouts = [rollout for position in batch.positions for rollout in self.journal.read_group(position)]
        filtered = [rollout for position in batch.dropped for rollout in self._read_dropped(position)]
        self._metrics = {"rollout/from_journal": 1.0} | staleness_metrics(rollouts, step - 1)
        if self.mask_older_than is not None:
            self._metrics["async/masked_share"] = mask_stale(rollouts, step - 1, self.mask_older_than)
        self.recorder.write(step, [*rollouts, *filtered])
        return StepRollouts(rollouts, TaskPosition(batch.first, batch.ahead), filtered, sampled=False)

    def metrics(self) -> dict[str, float]:
        """Return metrics of a step that was trained again since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _read_dropped(self, position: int) -> list[Rollout]:
        """Return the rollouts of a group that was dropped, marked so."""
        group = self.journal.read_group(position)
        for rollout in kept_rollouts(group):
            rollout.dropped, rollout.filtered = True, self.journal.reason(position)
        return group

    async def record_trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Record that a step was trained, with the advantages of its rollouts by ``rollout_id``."""
        await asyncio.to_thread(self.recorder.finish, step, advantages)
        await self.journal.record_trained(step)
