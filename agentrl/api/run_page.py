"""A run as HTML for notebooks: what it is, its curve as SVG, its newest metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.obs.expected_steps import expected_steps
from agentrl.obs.metrics import Points, merge_equal_series, read_metrics
from agentrl.obs.run_end import read_end
from agentrl.train.run_outputs import curve_keys

WIDTH, HEIGHT = 560, 140
"""Size of the curve, in pixels."""
_COLORS = ("#4051b5", "#c2410c", "#15803d", "#a21caf", "#0e7490", "#a16207")
SHOWN = ("train/reward", "train/loss", "train/kl", "rollout/tokens_per_s", "time/step_s")
"""Metrics of the newest step in the table, as far as it has them, with those of the curve."""


def run_page(folder: Path, config: Config) -> str:
    """Return a run as HTML.

    Raises:
        ConfigError: its files are damaged.
    """
    end = read_end(folder)
    state = "not ended, or killed" if end is None else f"{end.error}: {end.message}" if end.error else "finished"
    rows = read_metrics(folder / "metrics.jsonl")
    return progress_page(f"{folder} · {config.label} · {state}", rows, config)


def progress_page(title: str, rows: Sequence[Mapping[str, float]], config: Config) -> str:
    """Return rows of metrics as HTML: a title, how many steps are done, the curve, the newest values."""
    keys, newest = curve_keys(config), dict[str, float]()
    for row in rows:
        newest.update(row)
    step = int(newest.get("step", 0))
    steps = expected_steps(config.train, step, newest.get("data/epoch"))
    shown = [key for key in dict.fromkeys((*keys, *SHOWN)) if key in newest]
    cells = "".join(
        f'<tr><td style="text-align:left">{escape(key)}</td><td>{newest[key]:.4g}</td></tr>' for key in shown
    )
    bar = f'<progress value="{step}" max="{max(1, steps)}"></progress> step {step}/{steps}'
    return f"<div><b>{escape(title)}</b><br>{bar}<br>{curve(rows, keys)}<table>{cells}</table></div>"


def curve(rows: Sequence[Mapping[str, float]], keys: Sequence[str]) -> str:
    """Return the ``keys`` over steps as SVG, all on one scale; empty if no row has any. Equal series are drawn once."""
    series: dict[str, Points] = {key: [(row["step"], row[key]) for row in rows if key in row] for key in keys}
    drawn = merge_equal_series({key: points for key, points in series.items() if points})
    if not drawn:
        return ""
    steps = [step for _, points in drawn for step, _ in points]
    values = [value for _, points in drawn for _, value in points]
    lowest, highest, first, last = min(values), max(values), min(steps), max(steps)
    lines = []
    for number, (names, points) in enumerate(drawn):
        color = _COLORS[number % len(_COLORS)]
        places = [
            (
                5 + (WIDTH - 10) * (step - first) / ((last - first) or 1.0),
                HEIGHT - 5 - (HEIGHT - 10) * (value - lowest) / ((highest - lowest) or 1.0),
            )
            for step, value in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2"/>' for x, y in places) if len(places) < 40 else ""
        title = f"<title>{escape(' = '.join(names))}</title>"
        lines.append(f'<g fill="{color}">{title}<polyline points="{path}" fill="none" stroke="{color}"/>{dots}</g>')
    legend = " ".join(
        f'<span style="color:{_COLORS[number % len(_COLORS)]}">— {escape(" = ".join(names))}</span>'
        for number, (names, _) in enumerate(drawn)
    )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="learning curve">{"".join(lines)}</svg>'
        f"<br><small>{lowest:.4g} to {highest:.4g}: {legend}</small>"
    )
