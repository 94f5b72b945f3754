"""Engines that return what tokens were sampled from are asked for before they are started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.runtime.checks import check_engine


def interpreter(folder: Path, version: str) -> Path:
    """Return a program that reports the packages of an interpreter with SGLang."""
    report = {"sglang": True, "gpu": False, "kernels": False, "version": version}
    program = folder / f"python-{version}"
    program.write_text(f"#!/bin/sh\necho '{json.dumps(report)}'\n")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("version", ["0.5.17", "0.5.22.post1", "0.4.10"])
def test_an_sglang_without_sampling_masks_is_refused(tmp_path: Path, version: str) -> None:
    engine = ["sampler.backend=sglang", "sampler.sglang.device=cpu", "sampler.top_k=20"]
    python = f"sampler.sglang.python={interpreter(tmp_path, version)}"
    config = load_config(None, [*engine, python, "sampler.renormalise=engine"])
    with pytest.raises(ConfigError, match=rf"SGLang {version}: .* since 0\.5\.23; .*sampler\.renormalise=learner"):
        check_engine(config)
    check_engine(load_config(None, [*engine, python, "sampler.renormalise=learner", "algo.old_logprobs=learner"]))


@pytest.mark.parametrize("version", ["0.5.23", "0.6.0rc1", "0.5.24.dev12+g1f2e3d4", ""])
def test_others_are_not(tmp_path: Path, version: str) -> None:
    python = f"sampler.sglang.python={interpreter(tmp_path, version)}"
    settings = ["sampler.backend=sglang", "sampler.sglang.device=cpu", "sampler.top_k=20", "sampler.renormalise=engine"]
    check_engine(load_config(None, [*settings, python]))
