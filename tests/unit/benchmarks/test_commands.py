"""What benchmarks print, and when; what they check before they measure."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.errors import ConfigError, UserError
from agentrl.obs.step_times import StepTimes
from benchmarks.commands.output import open_table
from benchmarks.commands.step import print_times
from benchmarks.learner_loops import check_loop
from benchmarks.sandbox import SandboxBench


def test_rows_are_printed_as_they_are_measured() -> None:
    output = io.StringIO()

    def measure() -> None:
        with open_table(Console(file=output, width=40), "measuring", "what", "s", "GiB") as (table, _):
            table.add_row("a backend with a long name", "0.5", "")
            assert output.getvalue().splitlines()[-1] == "what a backend with a long name, s 0.5"
            table.add_row("another", "1.5", "2")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        measure()
    assert "another" in output.getvalue().splitlines()[-2], "the table has the rows so far"


def test_a_backend_that_does_not_work_is_named_before_the_first_measurement(tmp_path: Path) -> None:
    progress: list[str] = []
    docker = {"docker_url": f"unix://{tmp_path}/docker.sock"}
    bench = SandboxBench(["unsafe_subprocess", "docker"], [1], 4, [1], 4, docker)
    with pytest.raises(
        UserError, match=rf"no daemon listens at {tmp_path}/docker.sock.*leave docker out of --backends"
    ):
        next(bench.run(progress.append))
    assert progress == ["unsafe_subprocess starts", "docker starts"]


def test_a_loop_is_checked_before_the_first_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--loops=x: there are hf"):
        check_loop("x")
    monkeypatch.setattr(
        "benchmarks.learner_loops.find_spec", lambda package: None if package == "liger_kernel" else package
    )
    with pytest.raises(ConfigError, match="--loops=liger needs liger_kernel, not installed here; leave it out"):
        check_loop("liger")
    check_loop("hf")


def test_the_table_of_a_step_has_all_of_its_time() -> None:
    """Of 10 seconds a step 9 are the step's own, and of them half a second is in no phase."""
    output = io.StringIO()
    metrics = {"time/step_s": 9.0, "time/rollout_s": 6.0, "time/train_s": 2.5, "time/other_s": 0.5, "time/save_s": 0.7}
    times = [
        StepTimes(step, 10.0, {"learner": 8.0, "trainer": 1.0}, metrics | {"learner_idle/total": 0.7})
        for step in (2, 3)
    ]
    print_times(Console(file=output, width=100), times)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    for line in (
        "rollout 6.000 60.0% ######",
        "train 2.500 25.0% ##",
        "other 0.500 5.0%",
        "save 0.700 7.0% #",
        "other, between steps 0.300 3.0%",
        "whole step 10.000 100%",
        "host CPU s a step: 9.00, of it learner 8.00, trainer 1.00",
        "learner busy: 30.0% of the time",
    ):
        assert line in lines, lines
