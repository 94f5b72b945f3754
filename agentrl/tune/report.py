"""The results of a search: a table, and the configuration that it has found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_atomically
from agentrl.tune.resolve import settings_tree
from agentrl.tune.search import Search, Trial

_TITLES = {"train/sampler_kl": "KL", "rollout/accept_length": "accept length", "train/peak_gpu_gib": "GPU GiB"}


def result_table(trials: Sequence[Trial]) -> Table:
    """Return a table with a line for each trial; tokens/s have the standard deviation of the steps."""
    logged = [trial.measurement.metrics() if trial.measurement else {} for trial in trials]
    columns = [name for name in _TITLES if any(name in metrics for metrics in logged)]
    table = Table("choice", "s a step", "tokens/s", "gain", *(_TITLES[name] for name in columns), "result", box=SIMPLE)
    for trial, metrics in zip(trials, logged, strict=True):
        measured = trial.measurement
        cells = ["", ""]
        if measured is not None:
            cells = [
                f"{measured.step_s:.2f}",
                f"{measured.tokens_per_s:,.0f} ± {measured.spread * measured.tokens_per_s:,.0f}",
            ]
        gain = "" if trial.gain is None else f"{trial.gain:+.1%}"
        numbers = [f"{metrics[name]:.3g}" if name in metrics else "" for name in columns]
        result = f"{trial.outcome}: {trial.reason}" if trial.reason else trial.outcome
        table.add_row(trial.name, *cells, gain, *numbers, result)
    return table


def write_settings(path: Path, search: Search, about: Sequence[str]) -> None:
    """Write the settings that were kept as a configuration; a comment has ``about``, and what each choice gained."""
    lines = [
        *about,
        "Gains are in sampled tokens a second of whole steps, each over the settings kept before it.",
        f"The start configuration differed from itself by up to {search.noise:.1%}.",
    ]
    texts = {"kept": "{name}: {gain:+.1%}", "confirmed": "all together, measured again: {gain:+.1%} over the start"}
    lines += [
        texts[trial.outcome].format(name=trial.name, gain=trial.gain)
        for trial in search.trials
        if search.best and trial.outcome in texts
    ]
    if not search.best:
        lines.append("No choice gained more than that: this file changes nothing.")
    text = "".join(f"# {line}\n" for line in lines)
    with write_atomically(path) as partial:
        partial.write_text(text + (dump_yaml(settings_tree(search.best)) if search.best else ""), encoding="utf-8")
