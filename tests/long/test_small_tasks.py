"""The small tasks on a CPU: the score after training is in its band or above, and TRL's is, too."""

from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli.main import build_parser
from benchmarks.commands import learning
from benchmarks.learning_suite import TASKS, TRAINERS, band_key, read_bands

pytestmark = pytest.mark.long
BANDS = read_bands()


@pytest.mark.parametrize(
    ("task", "trainer"),
    [(task, trainer) for trainer in TRAINERS for task in TASKS if band_key(task, "small", trainer) in BANDS],
)
def test_a_small_policy_learns(task: str, trainer: str, tmp_path: Path) -> None:
    arguments = build_parser("bench").parse_args(["bench", "learning", f"--trainer={trainer}", f"--out={tmp_path}"])
    learning.make_small_policy(tmp_path)
    result = learning.train_task(arguments, task, 0, Console())
    print(f"{task} {trainer}: {result.initial:.3f} {result.final:.3f} {result.minutes:.1f} min")
    assert result.place(BANDS).startswith(("inside", "above")), result
    assert result.final > result.initial + 0.1
