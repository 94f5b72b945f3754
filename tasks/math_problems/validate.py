"""Whether the reward knows the right answers of a taskset as right."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import Env
from agentrl.core.errors import TaskError
from agentrl.core.registry import make_env
from agentrl.core.task import Task
from agentrl.core.types import Message

WRONG = "-31415926535"
"""No problem's answer."""


def validate(tasks: Iterable[Task], env: str = "python_math") -> list[str]:
    r"""Give each task its own answer in a ``\boxed{}``, and a wrong one; return what is said of those that score otherwise
    than 1 and 0. An empty list says that all is well.

    Args:
        tasks: with a text for an answer, or a list of them, each of which must score.
        env: the registered environment whose reward is asked.

    """
    played = make_env(env)
    faults = []
    for task in tasks:
        rights = [task.answer] if isinstance(task.answer, str) else task.answer
        try:
            faults += [
                f"task {task.id!r}: {answer!r} scores {reward:g}, and its own answers are {rights!r}"
                for answer in (*rights, WRONG)
                if (reward := _score(played, task, answer)) != (answer != WRONG)
            ]
        except TaskError as error:
            faults.append(str(error))
    return faults


def _score(env: Env, task: Task, answer: str) -> float:
    env.reset(seed=0, options={"task": task})
    return env.step(Message("assistant", f"\\boxed{{{answer}}}"))[1]
