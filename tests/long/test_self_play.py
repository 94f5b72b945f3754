"""Self-play in Kuhn poker learns to mix its moves, as docs/results.md reports it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 320
"""Those of the configuration."""


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
