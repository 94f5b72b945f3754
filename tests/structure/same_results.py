"""Compares two training runs bit for bit: ``python -m tests.structure.same_results RUN_A RUN_B``.

A refactor must not change what a run computes. CONTRIBUTING.md has the command of a run that is deterministic. Compared
are the metrics of every step (losses, gradient norms, rewards, …; not times), every rollout with its token ids,
log-probabilities and masks, the advantages, and the weights of the last checkpoint. The exit status is 0 if all are
equal. A metric that only one run has was renamed, added or removed: it is printed and is no difference.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

REQUIRED_METRICS = ("train/loss", "train/grad_norm", "train/reward")
"""Every training step of both runs must have these."""
TIMES = ("seconds", "tool_seconds", "tool_uses", "checksum")
"""Fields of a rollout that hold measured times, and its checksum, which counts them."""
MEASURED = (
    "time/",
    "engine_idle/",
    "learner_idle/",
    "slot_idle/",
    "host_memory/",
    "rollout/cache_hit",
    "async/running_episodes",
    "async/finished_groups",
)
"""Beginnings of metrics that are measured: times, memory, and how far sampling is ahead of the learner."""


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a JSON lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def compare_metrics(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """Differences between the metrics of two runs, and the keys that only one of them has."""
    rows = [read_lines(run / "metrics.jsonl") for run in (a, b)]
    differences, one_sided = [], set()
    if len(rows[0]) != len(rows[1]):
        differences.append(f"metrics: {len(rows[0])} and {len(rows[1])} lines")
    for first, second in zip(*rows, strict=False):
        where = f"metrics of step {first['step']}"
        keys = {key for key in first.keys() | second.keys() if not key.startswith(MEASURED)}
        for key in sorted(keys & first.keys() & second.keys()):
            if first[key] != second[key]:
                differences.append(f"{where}: {key} is {first[key]!r} and {second[key]!r}")
        one_sided |= {f"{key} only in {b if key in second else a}" for key in keys if (key in first) != (key in second)}
        if any(key.startswith("train/") for key in first.keys() | second.keys()):
            absent = [key for key in REQUIRED_METRICS if key not in first or key not in second]
            differences += [f"{where}: no {key}" for key in absent]
    return differences, sorted(one_sided)


def read_rollouts(run: Path) -> dict[str, Any]:
    """All rollouts and advantages of a run, by file and rollout, without times."""
    rollouts: dict[str, Any] = {}
    for path in sorted((run / "rollouts").glob("*.jsonl")):
        for rollout in read_lines(path):
            key = f"{path.name}: rollout {rollout['rollout_id']}"
            rollouts.setdefault(key, []).append({name: value for name, value in rollout.items() if name not in TIMES})
    for path in sorted((run / "rollouts").glob("*.json")):
        rollouts[path.name] = json.loads(path.read_text(encoding="utf-8"))
    return rollouts


def read_weights(run: Path) -> dict[str, Any]:
    """The weights of a run's last checkpoint, by name."""
    last = max((run / "checkpoints").glob("step_*"))
    weights: dict[str, Any] = {}
    for path in sorted((last / "model").glob("*.safetensors")):
        weights |= {f"weights of {last.name}: {name}": array for name, array in load_file(path).items()}
    return weights


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[str]:
    """One line for each entry that is not in both, or not the same in both."""
    for key in sorted(a.keys() | b.keys()):
        if key not in a or key not in b:
            yield f"{key} is only in the {'second' if key in b else 'first'} run"
        elif not _equal(a[key], b[key]):
            yield f"{key} differs"


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(a == b)


def compare_runs(a: Path, b: Path) -> tuple[list[str], list[str]]:
    """All differences between two runs, and the metrics that only one of them has."""
    differences, one_sided = compare_metrics(a, b)
    for read in (read_rollouts, read_weights):
        first, second = read(a), read(b)
        if not first and not second:
            differences.append(f"neither run has what {read.__name__} reads: nothing was compared")
        differences += compare(first, second)
    return differences, one_sided


def main(arguments: list[str]) -> int:
    """Print all differences; return the exit status."""
    differences, one_sided = compare_runs(*map(Path, arguments))
    print(*one_sided, *differences, sep="\n", end="\n" if one_sided or differences else "")
    print(f"{len(differences)} differences" if differences else "metrics, rollouts, advantages and weights are equal")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
