"""Self-play in Kuhn poker learns to mix its moves, and in tic-tac-toe not to lose, as docs/results.md reports it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 320
"""Those of the configuration of Kuhn poker."""
TICTACTOE_STEPS = 300
"""Those of the configuration of tic-tac-toe."""


def test_the_pool_of_kuhn_poker_is_hard_to_exploit_and_stays_so(tmp_path: Path) -> None:
    words = ["--config", "self_play/kuhn_poker", "run.dir=run", "obs.progress=plain", f"train.steps={2 * STEPS}"]
    done = agentrl("train", *words, cwd=tmp_path, timeout=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(tmp_path / "run") if "eval/exploitability" in row]
    for row in rows:
        policy, pool = row["eval/exploitability"], row["eval/pool_exploitability"]
        print(f"step {row['step']:.0f}: policy {policy:.3f}, pool {pool:.3f}", flush=True)
    pool = {row["step"]: row["eval/pool_exploitability"] for row in rows}
    assert pool[STEPS] <= pool[0] / 4
    assert pool[2 * STEPS] <= pool[0] / 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_tictactoe_is_not_lost_and_stays_so(tmp_path: Path, seed: int) -> None:
    steps = 2 * TICTACTOE_STEPS
    words = ["--config", "self_play/tictactoe", f"run.seed={seed}", f"train.steps={steps}"]
    done = agentrl("train", *words, "run.dir=run", "obs.progress=plain", cwd=tmp_path, timeout=3500)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["step"]: row for row in metrics(tmp_path / "run") if "eval/minimax/loss" in row}
    for step, row in rows.items():
        keys = ("minimax/loss", "random/loss", "random/win")
        print(f"step {step:.0f}:", {f"{key}/seat={n}": row[f"eval/{key}/seat={n}"] for key in keys for n in (0, 1)})
    for step in (TICTACTOE_STEPS, steps):
        row = rows[step]
        for seat, wins in ((0, 0.85), (1, 0.65)):
            assert row[f"eval/minimax/loss/seat={seat}"] <= 0.10
            assert row[f"eval/random/loss/seat={seat}"] <= 0.05
            assert row[f"eval/random/win/seat={seat}"] >= wins
