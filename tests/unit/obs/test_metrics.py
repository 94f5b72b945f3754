import dataclasses
import errno
import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from agentrl.config.load import load_config
from agentrl.core.types import FinishReason, Rollout, StopReason, Turn
from agentrl.obs.console import make_console
from agentrl.obs.metrics import MetricsLog, merge_equal_series, plot_curve, read_metrics
from agentrl.obs.progress import ProgressView, Stopwatch, format_left
from agentrl.obs.trackers import TensorBoard
from agentrl.obs.viewer.terminal import rollout_panel
from agentrl.train.run_outputs import draw_curve
from benchmarks.episode_runner import synthetic_rows


def test_a_step_is_on_disk_before_the_next(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5})
        assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "train/reward": 0.5}]


def test_resume_drops_the_steps_after_the_checkpoint_and_a_torn_line(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "train/reward": step / 10}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6, "tra')
    board = TensorBoard(tmp_path / "tensorboard", print, resume_after=3)
    with MetricsLog(tmp_path, trackers=[board], resume_after=3) as log:
        log.write(4, {"train/reward": 1.0})
    rows = read_metrics(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[-1]["train/reward"] == 1.0
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_keeps_the_metrics_that_were_no_number(tmp_path: Path) -> None:
    """They show that a loss broke, also after the resume."""
    with MetricsLog(tmp_path) as log:
        for step in (1, 2):
            log.write(step, {"train/loss": float("nan"), "train/reward": 0.5})
    first = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)[0]
    with MetricsLog(tmp_path, resume_after=1):
        assert (tmp_path / "metrics.jsonl").read_bytes() == first
    assert b'"train/loss": null' in first


def test_curve_is_a_png(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(0, {"eval/exact_match": 0.2})
        log.write(1, {"train/reward": 0.5})
    out = plot_curve(tmp_path / "metrics.jsonl", tmp_path / "curve.png", ["train/reward", "eval/exact_match"])
    assert out is not None
    assert out.read_bytes().startswith(b"\x89PNG")
    assert plot_curve(tmp_path / "metrics.jsonl", tmp_path / "none.png", ["no/such"]) is None


def test_a_curve_that_a_full_disk_refuses_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its error does not take the place of what ended the run."""

    def full(figure: Figure, path: Path, **_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Figure, "savefig", full)
    with MetricsLog(tmp_path) as log:
        log.write(1, {"train/reward": 0.5})
    (tmp_path / "curve.png").write_bytes(b"before")
    assert draw_curve(load_config(None, []), tmp_path, make_console()) is None
    assert f"no curve.png: {tmp_path / 'curve.png'}: No space left on device" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curve.png", "metrics.jsonl"]
    assert (tmp_path / "curve.png").read_bytes() == b"before"


def test_a_series_that_is_the_same_as_another_is_drawn_once_under_both_names() -> None:
    up, down = [(1.0, 0.1), (2.0, 0.2)], [(1.0, 0.2), (2.0, 0.1)]
    actual = merge_equal_series({"train/reward": up, "eval/reward": down, "rollout/exact_match": list(up)})
    assert actual == [(["train/reward", "rollout/exact_match"], up), (["eval/reward"], down)]


def test_time_left_is_what_the_minutes_leave() -> None:
    def left(seconds_left: float | None) -> str:
        out = io.StringIO()
        with ProgressView(Console(file=out, width=160), 1000, "plain") as view:
            view.step(1, {"time/step_s": 90.0}, seconds_left)
        return out.getvalue().split("left ")[1].strip()

    assert left(None) == "24h58m"
    assert left(1710.0) == "28m30s"
    assert left(-5.0) == "0m00s"


def test_progress_shows_every_metric_in_a_terminal_and_in_a_log() -> None:
    metrics = {
        "train/reward": 0.25, "rollout/exact_match": 0.3, "rollout/searches": 1.5, "rollout/valid_format": 0.9,
        "train/flat_groups": 0.4, "time/tokens_per_s": 1234.0, "time/step_s": 30.0,
    }  # fmt: skip
    for mode in ("live", "plain"):
        out = io.StringIO()
        with ProgressView(Console(file=out, width=120, force_terminal=mode == "live"), 10, mode) as view:
            view.phase("rollout")
            view.step(8, metrics)
        text = out.getvalue()
        for expected in ("0.250", "0.300", "1.50", "90%", "40%", "1,234", "1m00s"):
            assert expected in text, (mode, expected)


def test_progress_shows_the_reward_of_each_source_of_a_mixed_run() -> None:
    for mode in ("live", "plain"):
        out = io.StringIO()
        console = Console(file=out, width=120, force_terminal=mode == "live")
        with ProgressView(console, 10, mode, ["math", "search"]) as view:
            view.step(8, {"train/reward": 0.25, "train/math/reward": 0.125, "rollout/searches": 1.5})
        text = out.getvalue()
        assert text.index("reward") < text.index("math") < text.index("searches"), mode
        assert "0.125" in text
        assert "search " not in text, "a source without a rollout in the step"


def test_rollout_panel_colours_by_who_made_the_text() -> None:
    words = ["<s>", "the prompt", "<search>", "x</search>", "<end>", "found [b]y[/b]", "yes", "<end>"]
    [row] = synthetic_rows(1, 2, 6)
    provenance = np.array([0, 0, 1, 1, 1, 0, 1, 1], np.uint8)
    row = dataclasses.replace(row, token_ids=np.arange(8, dtype=np.int32), provenance=provenance)
    turns = [Turn("<search>x</search>", "found [b]y[/b]", FinishReason.STOP)]
    rollout = Rollout(
        "p", "r", [row], 1.0, StopReason.TERMINATED, {"exact_match": 1.0}, turns=turns, prompt="the prompt"
    )
    out = io.StringIO()
    panel = rollout_panel(rollout, "one", lambda ids: "".join(words[index] for index in ids))
    Console(file=out, width=100, force_terminal=True, color_system="standard").print(panel)
    text = out.getvalue()
    assert "found [b]y[/b]" in text
    assert "\x1b[2m<s>the prompt" in text
    assert "x</search><end>\x1b[0m\x1b[36mfound" in text
    assert "yes<end>" in text
    assert "\x1b[1;32m<search>" in text
    assert "terminated" in text


def test_stopwatch_adds_up() -> None:
    watch = Stopwatch()
    for _ in range(2):
        with watch("rollout"):
            pass
    assert set(watch.metrics()) == {"time/rollout_s"}
    assert format_left(3725) == "1h02m"


def test_small_numbers_keep_their_digits_and_what_is_no_number_is_null(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write(1, {"train/lr": 1e-6 / 572, "batch/tokens": 123_456_789_012.0, "train/loss": float("nan")})
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"train/loss": null' in line, "as strict readers of JSON take it"
    [row] = read_metrics(tmp_path / "metrics.jsonl")
    assert row == {"step": 1, "train/lr": 1.74825174825e-09, "batch/tokens": 123_456_789_012.0}
