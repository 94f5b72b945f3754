"""Check that the reference solutions of generated problems score 1, by the judge in its sandboxes."""

from __future__ import annotations

from collections.abc import Iterable

from agentrl import Message, Task, ToolCalls, ToolResults, make_env
from agentrl.core.tool import ToolClient

from .data import Contest
from .demonstrator import submission


async def validate(contest: Contest, tasks: Iterable[Task], judge: ToolClient, env: str = "code_contest") -> list[str]:
    """Submit the reference solution of each task, and return a message for each that does not score 1.

    ``python -m agentrl_tasks.contest`` does this for all families.
    """
    environment = make_env(env)
    faults = []
    for task in tasks:
        program = contest.problem(task).program
        environment.reset(seed=0, options={"task": task})
        action, *_ = environment.step(Message("assistant", submission(program)))
        assert isinstance(action, ToolCalls), "a program goes to the judge"
        [call] = action.calls
        result = await judge.call(call, episode_id=task.id)
        await judge.close_session(task.id)
        _, reward, *_ = environment.step(ToolResults((result,)))
        if reward != 1.0:
            faults.append(
                f"task {task.id!r} ({task.metadata['family']}): its solution scores {reward:g}: {result.data}"
            )
    return faults
