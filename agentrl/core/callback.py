"""Callbacks: code of users that a training run calls at each of its boundaries.

::

    class StopWhenSolved(agentrl.Callback):
        def on_eval(self, run, step, metrics):
            if metrics["eval/exact_match"] > 0.95:
                run.stop("exact match is above 0.95")

``agentrl.train(config, callbacks=[StopWhenSolved()])``, or ``train.callbacks=[my_callbacks.py:StopWhenSolved]`` in a
configuration.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.core.types import Rollout


@dataclass(slots=True)
class RunHandle:
    """What a callback knows of its run, and how it ends it.

    Example::

        RunHandle(folder=Path("runs/mine"), config={"train": {"steps": 100, …}, …}, steps=100, step=40)
    """

    folder: Path
    """Folder of the run."""
    config: Mapping[str, Any]
    """The configuration as in ``config.yaml``, nested, without secrets; changes have no effect."""
    steps: int
    """``train.steps``; in a replay, the steps that the recorded rollouts are enough for. With ``train.epochs`` the most: groups
    that filters drop make them fewer."""
    step: int
    """Training steps that are finished. It is the version of the policy, too. Resumed and forked runs begin above 0."""
    on_stop: Callable[[str], None] | None = None
    """Set by the run: called with the reason of the first `stop`."""
    stop_reason: str | None = None
    """The reason of the first `stop`; None until then."""

    def stop(self, reason: str) -> None:
        """End the run once the step in training is finished: it is evaluated, saved and closed as after its last step.

        Only the first call has an effect. It may come from any thread.

        Args:
            reason: is printed.
        """
        if self.stop_reason is None:
            self.stop_reason = reason
            if self.on_stop is not None:
                self.on_stop(reason)


@dataclass(frozen=True, slots=True)
class OptimizerBatch:
    """The batch of an optimizer step of the policy, before the step is taken."""

    step: int
    """The training step, from 1."""
    index: int
    """Index of the optimizer step in the training step, from 0; see ``train.steps_per_rollout``."""
    count: int
    """Optimizer steps of the training step."""
    policy: str
    """Which of several policies is trained; ``main`` if there is one."""
    lr_scale: float
    """Factor of the schedule on the learning rate."""
    metrics: Mapping[str, float]
    """Metrics of the batch, such as ``batch/trained_tokens``."""


HookResult = Awaitable[None] | None
"""Return type of most hooks: nothing, or the coroutine of a coroutine function, which is awaited."""
AddedMetrics = Mapping[str, float] | None
"""Metrics that `Callback.on_step` adds to the step, by name; None adds none."""


class Callback:
    """Base class of callbacks. Define the hooks that you need; those of this class do nothing.

    A hook is a plain function or a coroutine function. The run waits for it; with ``async.max_staleness`` episodes continue
    meanwhile. Plain functions are called in a thread, one hook at a time. What a hook raises, SystemExit and CancelledError
    included, ends the run with a `CallbackError` that names the callback, once the last finished step is saved.

    What a hook gets is the run's own data: read it only. A hook may end the run (`RunHandle.stop`), and `on_step` may add
    metrics. Callbacks have no state in checkpoints.
    """

    def on_start(self, run: RunHandle) -> HookResult:
        """The run has started its processes and loaded the weights; nothing was sampled."""

    def on_rollouts(self, run: RunHandle, rollouts: Sequence[Rollout]) -> HookResult:
        """The rollouts of the next training step are complete and graded; they are trained next.

        Args:
            run: the run; the step is ``run.step + 1``.
            rollouts: those of a task next to each other, those that are dropped (``rollout.dropped``) included.
        """

    def on_batch(self, run: RunHandle, batch: OptimizerBatch) -> HookResult:
        """An optimizer step of the policy is taken next. With ``async.streaming`` a part of its gradient may be there."""

    def on_step(self, run: RunHandle, metrics: Mapping[str, float]) -> AddedMetrics | Awaitable[AddedMetrics]:
        """A training step is finished, and the engines have its weights.

        Args:
            run: the run; the step is ``run.step``.
            metrics: of the step, as they are logged next.

        Returns:
            None, or a mapping of further metrics, finite numbers under names that ``metrics`` does not have. They are logged
            with the step, to trackers too.
        """

    def on_weights_synced(self, run: RunHandle) -> HookResult:
        """The weight sync of policy ``run.step`` is over, that before the first step included. Replays have none.

        With ``weights.sync_every`` the engines have the weights of the last step that it divides.
        """

    def on_eval(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> HookResult:
        """An evaluation is finished.

        Args:
            run: the run.
            step: after which the policy was evaluated; before ``run.step`` with ``eval.background``.
            metrics: of the evaluation, such as ``eval/exact_match``.
        """

    def on_checkpoint(self, run: RunHandle, path: Path) -> HookResult:
        """A checkpoint is complete on the disk. It is written in the background: the call may come some steps later.

        Args:
            run: the run.
            path: folder of the checkpoint, ``checkpoints/step_000040``; ``train.keep`` removes it later.
        """

    def on_end(self, run: RunHandle, error: BaseException | None) -> HookResult:
        """The run ends, and its last checkpoint is complete. Called once if `on_start` of all callbacks has returned.

        Args:
            run: the run.
            error: that ends the run, such as `RunStopped` after Ctrl-C; None if it has finished. What this hook itself raises
                then is printed, and the run ends with ``error``.
        """
