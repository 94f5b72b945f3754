"""Write the untrained policy (tokenizer and random weights) that ``--config python_math/sft_warm`` starts from.

``python -m agentrl_tasks.math_problems.make_policy OUT``
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl import Message
from agentrl_tasks.small_policy import run_command, save_policy

from .data import MathProblems
from .families import FAMILIES

_PROBLEMS = 3000


def texts() -> Iterator[str]:
    """Yield texts that the policy reads and writes: questions, calls and answers."""
    tasks = MathProblems(families=tuple(FAMILIES), seed=9000)
    for task in tasks.split("train")[:_PROBLEMS]:
        expert = tasks.demonstrator(task, np.random.default_rng(0))
        yield task.question
        yield expert.act(task.prompt)
        yield expert.act((Message("tool", task.answer),))


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, lambda out, seed: save_policy(out, texts(), seed=seed))


if __name__ == "__main__":
    main()
