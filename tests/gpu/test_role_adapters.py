"""Tic-tac-toe with SmolLM2 and an adapter for each role, through the command line: results before and after."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from deadlines import wait_until
from shared_runs import Running, metrics

from agentrl.models.peft_folder import read_peft

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(420)]

_log = logging.getLogger(__name__)
STEPS = 30
"""Enough for both roles: after 49 they won 0.63 and 0.52 of the games, 0.43 and 0.14 before."""
LIMIT_S = 400.0
CONFIG = "self_play/tictactoe_smollm2"
OPTIONS = ("attention_backend=triton", "sampling_backend=pytorch", "max_total_tokens=131072")
"""Of SGLang: kernels that need no compiler of CUDA, and memory that other tests leave."""
SHOWN = ("illegal", "win", "draw", "loss", "reward")


def test_both_roles_learn(smollm2: Path, tmp_path: Path, figures: list[str]) -> None:
    words = ["run.dir=run", f"model.path={smollm2}", "obs.progress=plain", "obs.tensorboard=false"]
    words += [f"train.steps={STEPS}", *(f"sampler.sglang.{option}" for option in OPTIONS)]
    run = Running("train", "--config", CONFIG, *words, cwd=tmp_path, fresh=True)
    seen: list[str] = []

    def ended() -> bool:
        lines = run.output().splitlines()
        for line in lines[len(seen) :]:
            _log.warning("%s", line)
        seen[:] = lines
        return run.process.poll() is not None

    try:
        wait_until(ended, LIMIT_S)
        assert run.finish(0) == 0, run.output()[-4000:]
    finally:
        run.end()
    rows = metrics(tmp_path / "run")
    state_before, *_, rows_after = [row for row in rows if "eval/random/reward" in row]
    steps = [row for row in rows if "train/loss" in row]
    for seat, role in enumerate(("first", "second")):
        for when, row in (("before", state_before), ("after", rows_after)):
            actual = {name: round(row[f"eval/random/{name}/seat={seat}"], 3) for name in SHOWN}
            figures.append(f"tictactoe, role {role} against random, {when} {steps[-1]['step']:g} steps: {actual}")
        assert rows_after[f"eval/random/illegal/seat={seat}"] < 0.1
        key = f"eval/random/win/seat={seat}"
        assert rows_after[key] > state_before[key], "it wins more games"
    gaps = [row["train/sampler_gap_max"] for row in steps]
    figures.append(f"tictactoe, largest difference of a log-probability between engine and learner: {max(gaps):.3g}")
    checkpoints = sorted((tmp_path / "run" / "checkpoints").iterdir())
    first, second = (dict(read_peft(checkpoints[-1] / "policies" / role)[1]) for role in ("first", "second"))
    assert first.keys() == second.keys()
    assert all(bool(tensor.any()) for name, tensor in (first | second).items() if ".lora_B." in name)
    assert any(not torch.equal(first[name], second[name]) for name in first)
