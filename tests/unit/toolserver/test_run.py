"""What a run says of tools that would run code in no sandbox."""

import logging

import pytest

from agentrl.config.load import load_config
from agentrl.runtime.run_tools import run_services, warn_unsandboxed


def said(caplog: pytest.LogCaptureFixture, *overrides: str) -> str:
    config = load_config(None, ["env.name=python_math", *overrides])
    with caplog.at_level(logging.CRITICAL):
        warn_unsandboxed(config, run_services(config))
    return "\n".join(record.getMessage() for record in caplog.records)  # caplog.text has no colours


def test_no_sandbox_is_told_in_red(caplog: pytest.LogCaptureFixture) -> None:
    text = said(caplog, "sandbox.backend=unsafe_subprocess")
    assert "\033[31msandbox.backend=unsafe_subprocess: NOTHING is sandboxed" in text
    assert "(python)" in text


@pytest.mark.parametrize(
    "overrides",
    [
        ["sandbox.backend=bubblewrap"],
        ["sandbox.backend=unsafe_subprocess", "tools.python.url=http://127.0.0.1:1"],
        ["sandbox.backend=unsafe_subprocess", "env.name=search_r1"],
    ],
)
def test_nothing_is_told_where_nothing_runs_bare(caplog: pytest.LogCaptureFixture, overrides: list[str]) -> None:
    assert said(caplog, *overrides) == ""
