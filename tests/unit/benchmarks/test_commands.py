"""What benchmarks print, and when; what they check before they measure."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.errors import ConfigError, UserError
from benchmarks.commands.output import open_table
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
