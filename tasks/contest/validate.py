"""Check that the reference solutions of generated problems score 1, by the judge in its sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import Message, Task, ToolCalls, ToolResults, make_env
from agentrl.toolserver.in_process import LocalTools

from .data import Contest
from .demonstrator import submission


def validate(contest: Contest, tasks: Iterable[Task], judge: LocalTools, env: str = "code_contest") -> list[str]:
    """Submit the reference solution of each task, and return a message for each that does not score 1.

    ``python -m agentrl_tasks.contest`` does this for all families. ``judge`` is what ``JudgeService.local`` returns.
    """
    environment = make_env(env)
    faults = []
    for task in tasks:
        program = contest.problem(task).program
        environment.reset(seed=0, options={"task": task})
        action, *_ = environment.step(Message("assistant", submission(program)))
        assert isinstance(action, ToolCalls), "a program goes to the judge"
        [result] = results = tuple(judge(call) for call in action.calls)
        judge.end_episode()
        _, reward, *_ = environment.step(ToolResults(results))
        if reward != 1.0:
            faults.append(
                f"task {task.id!r} ({task.metadata['family']}): its solution scores {reward:g}: {result.data}"
            )
    return faults
