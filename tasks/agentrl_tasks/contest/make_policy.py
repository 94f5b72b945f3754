"""Write the untrained policy (tokenizer and random weights) that ``--config code_contest/sft_warm`` starts from.

``python -m agentrl_tasks.contest.make_policy OUT``
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from agentrl_tasks.small_policy import run_command, save_policy

from .data import Contest

_PROBLEMS = 3000
_SEED = 9000


def texts() -> Iterator[str]:
    """Yield texts that the policy reads and writes: problems, and right and wrong programs."""
    tasks = Contest(seed=_SEED, slips=0.5)
    rng = np.random.default_rng(_SEED)
    for task in tasks.split("train")[:_PROBLEMS]:
        yield task.question
        yield tasks.demonstrator(task, rng).act(task.prompt)


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, lambda out, seed: save_policy(out, texts(), seed=seed))


if __name__ == "__main__":
    main()
