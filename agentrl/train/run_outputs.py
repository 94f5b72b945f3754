"""What watches a training run, and its outputs: metrics and trackers, the learning curve, the summary at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from agentrl.cluster.ray_address import running_address
from agentrl.config.engine_groups import evaluation_engines, training_engines
from agentrl.config.runners import concurrent_episodes, runner_count
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact
from agentrl.config.self_play import label
from agentrl.core.extras import install_command, is_installed
from agentrl.obs.console import print_message
from agentrl.obs.host_memory import HostMemory
from agentrl.obs.idle_time import IdleTime
from agentrl.obs.metrics import MetricsLog, plot_curve
from agentrl.obs.mlflow_tracker import open_mlflow
from agentrl.obs.otlp import OtlpSpans, open_otlp
from agentrl.obs.progress import ProgressView
from agentrl.obs.trace import TraceFiles
from agentrl.obs.trackers import Tracker, open_tensorboard, open_wandb
from agentrl.obs.trackio_tracker import open_trackio
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.runners.messages import PULSE_S


def open_monitor(
    config: Config, folder: Path, view: ProgressView, step: int, exits: AsyncExitStack
) -> tuple[list[Tracker], Callable[[], dict[str, float]]]:
    """Watch the waits of this context and of tasks started in it, until ``exits`` end it, in a run with ``step`` finished steps.

    Returns:
        traces, which draw some of the run's metrics, and what returns the metrics of a step: idle time, host memory by kind
        of process, and in the first step the times of the start.
    """
    obs, print_text = config.obs, view.print_text
    traces: list[TraceFiles | OtlpSpans] = []
    if obs.trace:
        traces.append(TraceFiles(folder, step=step + 1, keep=obs.trace_steps, note=print_text))
    if obs.otlp is not None:
        traces.append(open_otlp(obs.otlp, folder))
    for trace in traces:
        exits.callback(trace.close)
    engines, slots = engines_and_slots(config)
    idle_time = IdleTime(engines, slots, delay_s=2.5 * PULSE_S if _may_have_runners(config) else 0.0)
    memory = exits.enter_context(HostMemory(print_text))
    log = folder / "logs" / "watchdog.log"
    exits.enter_context(Watchdog(obs.stall_warning_s, print_text, log, (idle_time, *traces, view.start)))
    return [*traces], lambda: idle_time.metrics() | memory.metrics() | view.start.take_metrics()


def _may_have_runners(config: Config) -> bool:
    """Return whether a run has runner processes, or may have them once it knows the cores of the Ray cluster that it joins."""
    joins = config.placement.reserves_gpus and running_address() is not None
    return runner_count(config, sys.maxsize if joins else 0) > 0


def engines_and_slots(config: Config) -> tuple[int, int]:
    """Return the number of engines that clients can tell apart, and the most requests in progress during rollouts."""
    sampler, slots = config.sampler, concurrent_episodes(config)
    engines = len(sampler.urls) or training_engines(sampler)
    if isinstance(sampler.max_running, int):
        slots = min(slots, engines * sampler.max_running)
    return (1 if sampler.has_router_program else engines) + evaluation_engines(sampler), slots


CURVE = ("reward", "exact_match")
"""Evaluation metrics of the learning curve."""


def open_metrics(
    config: Config,
    folder: Path,
    note: Callable[[str], None],
    resume_after: int | None,
    extra_trackers: Sequence[Tracker] = (),
) -> MetricsLog:
    """Return the metrics log of a run with its trackers.

    Args:
        config: of the run.
        folder: of the run.
        note: prints a line for the user.
        resume_after: metrics after this step are deleted; None starts a new log.
        extra_trackers: in addition to those of the configuration.
    """
    trackers = [*extra_trackers, *open_tensorboard(folder, config.obs.tensorboard, note, resume_after=resume_after)]
    obs, settings = config.obs, redact(config.model_dump(mode="json"))
    if obs.wandb != "off":
        trackers += filter(None, [open_wandb(folder, obs, config=settings, note=note)])
    if obs.trackio:
        trackers += filter(None, [open_trackio(folder, obs.trackio_project, config=settings, note=note)])
    if obs.mlflow is not None:
        trackers += filter(None, [open_mlflow(folder, obs.mlflow, obs.mlflow_experiment, config=settings, note=note)])
    return MetricsLog(folder, trackers=trackers, table_rows=config.obs.table_rows, resume_after=resume_after)


def curve_keys(config: Config) -> list[str]:
    """Return the metrics that the learning curve shows, including those of each source and each evaluation set."""
    opponents = [] if config.self_play is None else [label(opponent) for opponent in config.self_play.eval.opponents]
    names = [(name, opponent) for name in config.eval.named_sets(config.sources) for opponent in opponents or [""]]
    prefixes = ["/".join(filter(None, ("eval", *name))) + "/" for name in names]
    sources = [f"train/{name}/reward" for name in config.sources]
    return ["train/reward", *sources, "rollout/exact_match", *(prefix + key for prefix in prefixes for key in CURVE)]


def draw_curve(config: Config, folder: Path, console: Console) -> Path | None:
    """Draw the learning curve of a run, and return its file, or None if there is nothing to draw, to draw with or to draw on."""
    if not is_installed("matplotlib"):
        command = install_command("matplotlib")
        console.print(
            f"no curve.png: {command} (agentrl view {folder} --html shows the curve)", markup=False, soft_wrap=True
        )
        return None
    try:
        return plot_curve(folder / "metrics.jsonl", folder / "curve.png", curve_keys(config))
    except OSError as error:  # a full disk, which may be what ends the run
        print_message(console, f"no curve.png: {error.filename}: {error.strerror}")
        return None


def print_summary(
    console: Console, folder: Path, step: int, evaluation: Mapping[str, float], curve: Path | None
) -> None:
    """Print where the outputs of a run are, and the main metrics of the last evaluation."""
    lines = {
        "checkpoint": folder / "checkpoints" / f"step_{step:06d}",
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts",
        "curve": curve,
    }
    console.print(
        "\n".join(f"{name:<11} {path}" for name, path in lines.items() if path and path.exists()),
        highlight=False,
        soft_wrap=True,
    )
    if evaluation:
        shown = {key: round(value, 4) for key, value in evaluation.items() if is_main_metric(key)}
        console.print(json.dumps(shown), highlight=False, markup=False, soft_wrap=True)


def is_main_metric(key: str) -> bool:
    """Return whether the summary shows an evaluation metric; ``metrics.jsonl`` has all of them."""
    metric, _, suffix = key.rpartition("/")
    return suffix != "ci95" and ("=" not in suffix or metric.endswith(CURVE))
