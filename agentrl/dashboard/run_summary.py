"""What lists, curves, the step timeline and comparisons show of runs, as JSON-able data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from agentrl.core.errors import UserError
from agentrl.dashboard.metrics_file import curve, metric_keys
from agentrl.dashboard.runs import HERE, DashboardRun, Runs
from agentrl.obs.idle_time import ENGINE_CAUSES
from agentrl.obs.progress import PAUSES, STEP_PHASES
from agentrl.obs.trace import RUN, read_trace, trace_files
from agentrl.obs.viewer.page import describe_run
from agentrl.obs.viewer.run_files import RunFiles

MOST_SPANS = 4000
"""Most spans of a trace that are sent, the longest."""
TRACE_BYTES = 64 * 2**20
"""Largest trace that is read."""
MOST_PROMPTS = 500
"""Most prompts of two runs that are compared: those that differ most."""


def summary(run: DashboardRun, root: Path) -> dict[str, object]:
    """Return the line of a run in the list of runs."""
    rows = run.metrics.rows()
    last = metric_keys(rows)
    signature = run.signature()
    end = run.end
    state = run.state()
    return {
        "run": run.name,
        "title": root.name if run.name == HERE else run.name,
        "state": state,
        "error": f"{end.error}: {end.message}" if end is not None and end.error else "",
        "step": max((row["step"] for row in rows if "time/step_s" in row or "train/reward" in row), default=0),
        "steps": (run.config.get("train") or {}).get("steps"),
        "reward": last.get("train/reward"),
        "evaluation": last.get("eval/reward"),
        "step_s": last.get("time/step_s"),
        "written_at": max(signature[:4]) / 1e9,
        "damaged_lines": run.metrics.damaged,
        "about": describe_run(RunFiles(run.folder, run.folder, {}, run.config)),
        "has_league": (run.folder / "league.jsonl").is_file(),
    }


def curves(runs: Runs, names: list[str], keys: list[str]) -> dict[str, object]:
    """Return the curves of metrics of runs: ``{run: {key: {"steps": […], "values": […]}}}``."""
    rows_by_run = {name: runs.run(name).metrics.rows() for name in names}
    return {name: {key: curve(rows, key) for key in keys} for name, rows in rows_by_run.items()}


def step_times(run: DashboardRun, last: int, limit: int) -> dict[str, object]:
    """Return the seconds by phase, and the idle shares by cause, of up to ``limit`` training steps until ``last`` (0: all)."""
    rows = [row for row in run.metrics.rows() if "time/step_s" in row]
    chosen = [row for row in rows if not last or row["step"] <= last][-limit:]
    traced = {int(path.stem.removeprefix("step_")) for path in trace_files(run.folder)}
    return {
        "phases": [*STEP_PHASES, "other", *PAUSES],
        "causes": list(ENGINE_CAUSES),
        "first": rows[0]["step"] if rows else 0,
        "last": rows[-1]["step"] if rows else 0,
        "steps": [
            {
                "step": row["step"],
                "seconds": row["time/step_s"],
                "traced": row["step"] in traced,
                "phases": _values(row, "time/{}_s", (*STEP_PHASES, "other", *PAUSES)),
                "engine_idle": _values(row, "engine_idle/{}", ENGINE_CAUSES),
                "learner_idle": row.get("learner_idle/total"),
                "slot_idle": _values(row, "slot_idle/{}", ("tools", "long_tail")),
                "tokens_per_s": row.get("time/tokens_per_s"),
                "reward": row.get("train/reward"),
            }
            for row in chosen
        ],
    }


def _values(row: Mapping[str, float], key: str, names: tuple[str, ...]) -> dict[str, float]:
    return {name: row[key.format(name)] for name in names if row.get(key.format(name))}


def trace_spans(run: DashboardRun, step: int) -> dict[str, object]:
    """Return the longest spans of a step's trace, by track.

    Returns:
        ``{"begin", "end", "spans": [[group, track, begin, seconds, name, details]], "left_out"}``; seconds from the first span.

    Raises:
        UserError: the step has no trace, or one that is too large for a page.
    """
    path = run.folder / "traces" / f"step_{step:06d}.json"
    if path not in trace_files(run.folder):
        raise UserError(f"step {step} has no trace: set obs.trace=true; obs.trace_steps is the number that is kept")
    if path.stat().st_size > TRACE_BYTES:
        raise UserError(f"{path} has {path.stat().st_size >> 20} MiB: open it in Perfetto")
    events = [event for event in read_trace(path) if event.get("ph") == "X"]
    events.sort(key=lambda event: (event["pid"] != RUN, -event["dur"]))
    begin = min((event["ts"] for event in events), default=0.0)
    spans = [
        [
            event["pid"],
            event["tid"],
            (event["ts"] - begin) / 1e6,
            event["dur"] / 1e6,
            event["name"],
            event["args"].get("of", ""),
        ]
        for event in events[:MOST_SPANS]
    ]
    end = max((span[2] + span[3] for span in spans), default=0.0)
    return {"end": end, "spans": spans, "left_out": max(0, len(events) - MOST_SPANS)}


def comparison(first: DashboardRun, second: DashboardRun) -> dict[str, object]:
    """Return what differs between two runs: configuration, last values of metrics, mean reward of prompts that both have."""
    settings = [flatten(run.config) for run in (first, second)]
    names = sorted(settings[0].keys() | settings[1].keys())
    differing = [name for name in names if settings[0].get(name) != settings[1].get(name)]
    values = [metric_keys(run.metrics.rows()) for run in (first, second)]
    prompts = [run.rollouts.rewards_by_prompt("train") for run in (first, second)]
    shared = prompts[0].keys() & prompts[1].keys()
    means = {name: [_mean_of_last_step(rewards[name]) for rewards in prompts] for name in shared}
    names_by_difference = sorted(shared, key=lambda name: (-abs(means[name][0] - means[name][1]), name))
    rows = [
        {"prompt": name, "steps": [max(rewards[name])[0] for rewards in prompts], "rewards": means[name]}
        for name in names_by_difference[:MOST_PROMPTS]
    ]
    return {
        "settings": [{"key": name, "values": [text.get(name) for text in settings]} for name in differing],
        "metrics": [
            {"key": key, "values": [last.get(key) for last in values]}
            for key in sorted(values[0].keys() | values[1].keys())
        ],
        "prompts": rows,
        "shared_prompts": len(shared),
    }


def _mean_of_last_step(rewards: list[tuple[int, float]]) -> float:
    last = max(step for step, _ in rewards)
    numbers = [reward for step, reward in rewards if step == last and reward == reward]
    return sum(numbers) / len(numbers) if numbers else 0.0


def flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Return the values of a configuration as text, by dotted key."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            texts |= flatten(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = str(value)
    return texts
