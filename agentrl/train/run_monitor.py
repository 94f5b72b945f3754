"""What watches a training run: the watchdog, traces, idle time, and host memory."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.obs.host_memory import HostMemory
from agentrl.obs.idle_time import IdleTime
from agentrl.obs.otlp import OtlpSpans, open_otlp
from agentrl.obs.progress import ProgressView
from agentrl.obs.trace import TraceFiles
from agentrl.obs.trackers import Tracker
from agentrl.obs.watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class RunMonitor:
    """What watches a run; opened by `open_monitor`."""

    traces: tuple[TraceFiles | OtlpSpans, ...]
    """Receive the run's spans."""
    idle_time: IdleTime
    host_memory: HostMemory

    @property
    def trackers(self) -> list[Tracker]:
        """What receives the run's metrics: traces draw some of them."""
        return list(self.traces)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a training step: idle time, and host memory by kind of process."""
        return self.idle_time.metrics() | self.host_memory.metrics()


def open_monitor(config: Config, folder: Path, view: ProgressView, step: int, exits: AsyncExitStack) -> RunMonitor:
    """Watch the waits of this context and of tasks started in it, until ``exits`` end it.

    Args:
        config: of the run.
        folder: of the run.
        view: shows reports and warnings, and the progress of the start.
        step: finished steps.
        exits: gets what ends the threads.
    """
    obs, print_text = config.obs, view.print_text
    traces: list[TraceFiles | OtlpSpans] = []
    if obs.trace:
        traces.append(TraceFiles(folder, step=step + 1, keep=obs.trace_steps, note=print_text))
    if obs.otlp is not None:
        traces.append(open_otlp(obs.otlp, folder))
    for trace in traces:
        exits.callback(trace.close)
    idle_time = IdleTime(*engines_and_slots(config))
    memory = exits.enter_context(HostMemory(print_text))
    log = folder / "logs" / "watchdog.log"
    exits.enter_context(Watchdog(obs.stall_warning_s, print_text, log, (idle_time, *traces, *view.listeners)))
    return RunMonitor(tuple(traces), idle_time, memory)


def engines_and_slots(config: Config) -> tuple[int, int]:
    """Return the number of engines that clients can tell apart, and the most requests in progress during rollouts."""
    sampler, rollout = config.sampler, config.rollout
    engines = len(sampler.urls) or sampler.engines
    groups = rollout.over_sampling_batch_size or (config.asynchronous.max_staleness + 1) * rollout.batch_size
    slots = min(rollout.concurrency, groups * rollout.n_samples_per_prompt)
    if isinstance(sampler.max_running, int):
        slots = min(slots, engines * sampler.max_running)
    return (1 if sampler.router_kind.is_program else engines) + config.eval.engines, slots
