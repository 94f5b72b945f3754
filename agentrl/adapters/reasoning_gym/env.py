"""One question of reasoning-gym, one answer, scored by its dataset."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from typing_extensions import override

from agentrl.adapters.reasoning_gym.library import AnswerLimitError, scorers
from agentrl.adapters.reasoning_gym.tasks import ReasoningGym, TaskOptions
from agentrl.core.env import AsyncEnv, Step
from agentrl.core.task import Task, TaskSet
from agentrl.core.types import THINK_END, Action, Message
from agentrl.core.user_code import call_in_thread

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnv(AsyncEnv):
    """Shows a question and ends with the policy's first turn. The reward is the score of the question's dataset, 0 to 1.

    An answer that takes more than the CPU time of a score has the reward 0 and the metric ``over_limit``.

    Args: see `TaskOptions`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "name": "reasoning_gym"}  # type: ignore[misc]

    def __init__(
        self,
        dataset: str | None = None,
        config: Mapping[str, Any] = {},  # noqa: B006 never changed
        level: int | None = None,
        datasets: Mapping[str, Mapping[str, Any]] = {},  # noqa: B006
        size: int = 5000,
        eval_size: int = 200,
        seed: int = 0,
        system_prompt: str | None = "default",
        answer: str = "tags",
    ) -> None:  # the constructor's arguments are env.options
        self._answer = answer

    @classmethod
    @override
    def task_set(cls, options: Mapping[str, Any]) -> TaskSet:
        return ReasoningGym(TaskOptions(**options))

    @classmethod
    @override
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        return cls.task_set({}).split(split)

    @classmethod
    @override
    def example_task(cls) -> Task:
        return ReasoningGym(TaskOptions("chain_sum", size=1)).split("train")[0]

    @override
    async def astep(self, action: Action) -> Step:
        assert isinstance(action, Message), "there are no tools"
        answer = read_answer(action.content, self._answer)
        score, over_limit = await call_in_thread(lambda: score_answer(self.task, answer), "reasoning_gym")
        metrics = {f"score/{self.task.metadata['dataset']}": score, "no_answer": float(answer is None)}
        return (), score, True, False, {"metrics": {**metrics, "over_limit": float(over_limit)}}


def read_answer(turn: str, form: str) -> str | None:
    """Return the answer in a turn; None: it has no ``<answer>`` tags.

    Args:
        turn: the text of the policy.
        form: `TaskOptions.answer`.
    """
    text = turn.rpartition(THINK_END)[2]
    if form == "text":
        return text.strip()
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def score_answer(task: Task, answer: str | None) -> tuple[float, bool]:
    """Return the score that reasoning-gym gives to an answer, and whether it went beyond a limit.

    Raises:
        LibraryError: reasoning-gym raised, or its processes ended.
    """
    facts = task.metadata
    arguments = {name: facts[name] for name in ("dataset", "config", "level", "entry")}
    try:
        return float(scorers().call("score_answer", answer=answer, **arguments)), False
    except AnswerLimitError:
        return 0.0, True
