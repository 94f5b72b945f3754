"""The command line with its learner in the same process, for runs with self-play: a target of `preloaded.Forked`.

``begun.json``, in the working directory, has the trainer's state and the driver's random states before the first step.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import in_process_learner

from agentrl.learner.random_states import random_states, states_to_json
from agentrl.train import run
from agentrl.train.trainer import Trainer

BEGUN = Path("begun.json")


class RecordingTrainer(Trainer):
    """Writes its state before it trains."""

    async def run(self) -> None:
        """Train to the last step."""
        BEGUN.write_text(json.dumps(self.state() | {"random": states_to_json(random_states())}), encoding="utf-8")
        await super().run()


class DrawingLearner(in_process_learner.InProcessLearner):
    """Draws from the driver's generator once it is loaded, as the start of Ray does."""

    def load(self, folder: Path) -> None:
        """Read the state."""
        super().load(folder)
        random.random()


def start_learners(*arguments: Any, run_dir: Path, **options: Any) -> DrawingLearner:
    """Load the learner; takes the place of `in_process_learner.start_learners`."""
    model, learner, algo = arguments
    return DrawingLearner(model, learner, algo, seed=options["seed"], reference=options["reference"])


def main() -> int:
    """Run the command line."""
    training_run: Any = run
    in_process_learner.start_learners = start_learners
    training_run.run_training = partial(training_run.run_training, extras=run.RunExtras(make_trainer=RecordingTrainer))
    return in_process_learner.main()
