"""Check that the reward accepts the right answers of a taskset."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import Env, Message, Task, TaskError, make_env

WRONG = "-31415926535"
"""Not the answer of any problem."""


def validate(tasks: Iterable[Task], env: str = "python_math") -> list[str]:
    r"""Answer each task with its answer in a ``\boxed{}``, and with a wrong one; return a message for each that does not
    score 1 and 0, respectively.

    Args:
        tasks: with an answer, or a list of answers, each of which must score 1.
        env: the registered environment whose reward is checked.
    """
    environment = make_env(env)
    faults = []
    for task in tasks:
        rights = [task.answer] if isinstance(task.answer, str) else task.answer
        try:
            faults += [
                f"task {task.id!r}: {answer!r} scores {reward:g}, and its answers are {rights!r}"
                for answer in (*rights, WRONG)
                if (reward := _score(environment, task, answer)) != (answer != WRONG)
            ]
        except TaskError as error:
            faults.append(str(error))
    return faults


def _score(env: Env, task: Task, answer: str) -> float:
    env.reset(seed=0, options={"task": task})
    return env.step(Message("assistant", f"\\boxed{{{answer}}}"))[1]
