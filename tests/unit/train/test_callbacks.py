"""Callbacks of a run, with a fake learner and recorded rollouts: the order of the hooks, what they may do, what they raise."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl import Callback, OptimizerBatch, Rollout, RunHandle
from agentrl.core.errors import CallbackError, ConfigError, EngineError
from agentrl.learner.checkpoints import latest_checkpoint
from agentrl.testing import FakeLearner
from agentrl.train.callbacks import RunCallbacks, check_objects, load_callbacks
from agentrl.train.trainer import Trainer
from tests.unit.train.test_replay import config
from tests.unit.train.test_trainer import Engines, steps, trainer


class Diary(Callback):
    """Notes every call, and raises or stops where it is to."""

    def __init__(
        self, failure: BaseException | None = None, fails_in: str = "", stops_in: str = "", name: str = "mine"
    ) -> None:
        self.name = name
        self.calls: list[str] = []
        self._failure, self._fails_in, self._stops_in = failure, fails_in, stops_in

    def note(self, run: RunHandle, hook: str, details: object = "") -> None:
        self.calls.append(f"{hook} {run.step} {details}".strip())
        if hook == self._stops_in:
            run.stop(f"{hook} has seen enough")
        if hook == self._fails_in and self._failure is not None:
            raise self._failure

    def on_start(self, run: RunHandle) -> None:
        self.note(run, "start")

    def on_rollouts(self, run: RunHandle, rollouts: Sequence[Rollout]) -> None:
        self.note(run, "rollouts", len(rollouts))

    def on_batch(self, run: RunHandle, batch: OptimizerBatch) -> None:
        self.note(run, "batch", f"{batch.index + 1}/{batch.count}")

    async def on_step(self, run: RunHandle, metrics: Mapping[str, float]) -> dict[str, float]:
        await asyncio.sleep(0)
        self.note(run, "step")
        return {f"{self.name}/reward": 2 * metrics["train/reward"]}

    def on_weights_synced(self, run: RunHandle) -> None:
        self.note(run, "synced")

    def on_eval(self, run: RunHandle, step: int, metrics: Mapping[str, float]) -> None:
        self.note(run, "eval", step)

    def on_checkpoint(self, run: RunHandle, path: Path) -> None:
        self.note(run, "checkpoint", path.name)

    def on_end(self, run: RunHandle, error: BaseException | None) -> None:
        self.note(run, "end", type(error).__name__ if error else "")


def with_callbacks(folder: Path, *callbacks: Callback, **options: Any) -> Trainer:
    """A trainer with callbacks, whose source samples: three steps, with an evaluation before and after."""
    run_config = config("train.save_every=1", "train.eval_every=0", "train.steps=3", "train.steps_per_rollout=2")
    run = trainer(folder, run_config, FakeLearner(), **options)
    handle = RunHandle(folder, {}, run.source.steps, 0)
    run.callbacks = run.steps.callbacks = run.evaluations.callbacks = RunCallbacks(callbacks, handle)
    return run


@pytest.fixture(autouse=True)
def engines_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source is asked for a weight sync that engines get."""
    monkeypatch.setattr(Engines, "samples", True)


async def train(run: Trainer) -> None:
    async with run.callbacks.running(run.view):
        await run.run()


def test_hooks_are_called_at_their_boundaries(tmp_path: Path) -> None:
    diary = Diary()
    asyncio.run(train(with_callbacks(tmp_path, diary, ratings=[1.0, 2.0])))
    calls = [call for call in diary.calls if not call.startswith("checkpoint")]
    assert calls[:3] == ["start 0", "synced 0", "eval 0 0"]
    assert calls[3:8] == ["rollouts 0 4", "batch 0 1/2", "batch 0 2/2", "synced 1", "step 1"]
    assert calls[-4:] == ["synced 3", "step 3", "eval 3 3", "end 3"]
    # They are written in the background.
    assert [call.split()[2] for call in diary.calls if call.startswith("checkpoint")] == [
        f"step_00000{step}" for step in (1, 2, 3)
    ]
    assert diary.calls.index("end 3") == len(diary.calls) - 1
    assert [row["mine/reward"] for row in steps(tmp_path)] == [2 * row["train/reward"] for row in steps(tmp_path)]


@pytest.mark.parametrize(("hook", "last_step"), [("start", 0), ("rollouts", 1), ("step", 1), ("eval", 0)])
def test_a_stop_ends_the_run_as_its_last_step_does(tmp_path: Path, hook: str, last_step: int) -> None:
    out = io.StringIO()
    diary = Diary(stops_in=hook)
    run = with_callbacks(tmp_path, diary, ratings=[1.0, 2.0], console=Console(file=out, width=200))
    asyncio.run(train(run))
    assert run.step == last_step
    assert diary.calls[-1] == f"end {last_step}"
    assert f"eval {last_step} {last_step}" in diary.calls
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == f"step_{last_step:06d}"
    assert out.getvalue().count(f"a callback stops the run: {hook} has seen enough") == 1


@pytest.mark.parametrize("failure", [ValueError("no number"), SystemExit(3), asyncio.CancelledError("mine")])
@pytest.mark.parametrize("hook", ["rollouts", "step", "checkpoint"])
def test_what_a_hook_raises_ends_the_run_with_its_name_and_the_step_is_saved(
    tmp_path: Path, hook: str, failure: BaseException
) -> None:
    diary, after = Diary(failure, fails_in=hook), Diary(name="other")
    run = with_callbacks(tmp_path, diary, after)
    with pytest.raises(CallbackError, match=rf"^callback Diary\.on_{hook} raised {type(failure).__name__}: .*\(test_"):
        asyncio.run(train(run))
    assert diary.calls[-1] == after.calls[-1] == f"end {run.step} CallbackError"
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == f"step_{run.step:06d}"
    assert len(steps(tmp_path)) == run.step, "the row of the step is written"


def test_an_error_of_the_run_is_not_hidden_by_that_of_on_end(tmp_path: Path) -> None:
    out = io.StringIO()
    diary = Diary(ValueError("second"), fails_in="end")
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(train(with_callbacks(tmp_path, diary, refuse=2, console=Console(file=out, width=200))))
    assert diary.calls[-1] == "end 2 EngineError"
    assert "step 2" not in diary.calls, "the engines do not have its weights"
    assert "warning: callback Diary.on_end raised ValueError: second" in out.getvalue()


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3.0, "3.0; it may return a mapping of metrics, or None"),
        ({"mine": "much"}, "the metric 'mine'='much', which is no finite number"),
        ({"mine": float("nan")}, "which is no finite number"),
        ({"mine": 10**400}, "which is no finite number"),
        ({"train/reward": 1.0}, "'train/reward', which the step has already; rename it"),
    ],
)
def test_only_new_finite_metrics_are_added(tmp_path: Path, result: object, message: str) -> None:
    class Metrics(Callback):
        def on_step(self, run: RunHandle, metrics: Mapping[str, float]) -> object:
            return result

    with pytest.raises(CallbackError, match=f"^callback Metrics.on_step returned.*{message}"):
        asyncio.run(RunCallbacks([Metrics()]).on_step({"train/reward": 0.5}))


def test_references_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "import agentrl\n\nclass Quiet(agentrl.Callback):\n    pass\n\nquiet = Quiet()\n\nclass Broken(agentrl.Callback):\n"
        "    def __init__(self):\n        raise SystemExit(1)\n"
    )
    made, found = load_callbacks(["mine.py:Quiet", "mine.py:quiet"])
    assert type(made) is type(found)
    with pytest.raises(ConfigError, match=r"^train.callbacks=mine.py:Broken: Broken\(\) raised SystemExit: 1"):
        load_callbacks(["mine.py:Broken"])
    with pytest.raises(ConfigError, match=r"no subclass of agentrl\.Callback"):
        load_callbacks(["pathlib:Path"])
    with pytest.raises(ConfigError, match=r"no instance of agentrl.Callback; call the class"):
        check_objects([Callback])
