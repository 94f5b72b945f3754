"""What happens when the real server's start fails."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.errors import ConfigError
from agentrl.inference.launch.processes import launch_sglang

pytestmark = pytest.mark.sglang

REFUSED = {
    "mem_fraction_statik": (0.5, r"^sampler\.sglang\.mem_fraction_statik: SGLang refuses it"),
    "tp_size": ("many", r"^sampler\.sglang\.tp_size: SGLang refuses its value .*'many'"),
}


@pytest.fixture(scope="module")
def starts(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """All at once: each takes seconds to import what it needs to read its options."""
    folder = tmp_path_factory.mktemp("refused")

    def start(option: str) -> Any:
        options = {"device": "cpu", option: REFUSED[option][0]}
        return launch_sglang(folder, log=folder / option, options=options, python=sglang_python, timeout_s=200)

    with ThreadPoolExecutor(len(REFUSED)) as pool:
        yield {option: pool.submit(start, option) for option in REFUSED}


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_the_server_does_not_know(starts: dict[str, Future[Any]], option: str) -> None:
    with pytest.raises(ConfigError, match=REFUSED[option][1]):
        starts[option].result()
