"""Whether the reward knows the right answers of a taskset as right."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl.errors import TaskError
from agentrl.registry import make_env
from agentrl.task import Task
from agentrl.types import Message


def validate(tasks: Iterable[Task], env: str = "python_math") -> list[str]:
    r"""Give each task its own answer in a ``\boxed{}``, and return what is said of those that do not score 1.

    ``python -m agentrl_tasks.math_problems FILE …`` does so for the rows of files.

    Args:
        tasks: with a text for an answer, or a list of them, each of which must score.
        env: the registered environment whose reward is asked.

    """
    played = make_env(env)
    faults = []
    for task in tasks:
        for answer in [task.answer] if isinstance(task.answer, str) else task.answer:
            try:
                played.reset(seed=0, options={"task": task})
                _, reward, *_ = played.step(Message("assistant", f"\\boxed{{{answer}}}"))
            except TaskError as error:
                faults.append(str(error))
            else:
                if reward != 1.0:
                    faults.append(f"task {task.id!r}: its own answer {answer!r} scores {reward:g}")
    return faults
