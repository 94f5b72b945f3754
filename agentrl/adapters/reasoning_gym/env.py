"""One question of reasoning-gym, one answer, scored by its dataset."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from agentrl.adapters.reasoning_gym import library
from agentrl.adapters.reasoning_gym.library import AnswerLimitError, scorers
from agentrl.adapters.reasoning_gym.tasks import KEY, TaskOptions, open_split
from agentrl.core.env import AsyncEnv, Step
from agentrl.core.registry import build
from agentrl.core.task import Task
from agentrl.core.types import THINK_END, Action, Message
from agentrl.core.user_code import call_in_thread

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymEnv(AsyncEnv):
    """Shows a question and ends with the policy's first turn. The reward is the score of the question's dataset, 0 to 1.

    An answer that the scorer cannot read, or that takes more CPU time than a score may, has the reward 0 and the metric
    ``unreadable`` or ``over_limit``.

    Args: see `TaskOptions`.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "name": "reasoning_gym"}  # type: ignore[misc]

    def __init__(
        self,
        dataset: str | None = None,
        config: Mapping[str, object] = {},
        level: int | None = None,
        datasets: Mapping[str, Mapping[str, object]] = {},
        size: int = 5000,
        eval_size: int = 200,
        seed: int = 0,
        system_prompt: str | None = "default",
        answer: str = "tags",
    ) -> None:  # the constructor's arguments are env.options
        self._answer = answer

    @classmethod
    @override
    def configured_tasks(cls, split: str, seed: int, options: Mapping[str, object]) -> Sequence[Task]:
        read_options: Callable[..., TaskOptions] = TaskOptions
        return open_split(build(read_options, options, KEY), split)

    @classmethod
    @override
    def example_task(cls) -> Task:
        return open_split(TaskOptions("chain_sum", size=1), "train")[0]

    @override
    async def astep(self, action: Action) -> Step:
        assert isinstance(action, Message), "there are no tools"
        answer = read_answer(action.content, self._answer)
        score = await call_in_thread(lambda: score_answer(self.task, answer), "reasoning_gym")
        metrics = {
            f"score/{self.task.metadata['dataset']}": score.value,
            "no_answer": float(answer is None),
            "unreadable": float(score.unreadable),
            "over_limit": float(score.over_limit),
        }
        return (), score.value, True, False, {"metrics": metrics}


@dataclass(frozen=True, slots=True)
class Score:
    """What reasoning-gym gives to an answer."""

    value: float
    """0 to 1."""
    unreadable: bool = False
    """Whether the scorer raised for the answer, and not for the entry's own one."""
    over_limit: bool = False
    """Whether the answer took more CPU time or stack than a score may take."""


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


def score_answer(task: Task, answer: str | None) -> Score:
    """Return the score that reasoning-gym gives to an answer; None: there is none.

    Raises:
        LibraryError: the scorer raised for the entry's own answer, too, or the processes that score ended.
    """
    facts = task.metadata
    arguments = {name: facts[name] for name in ("dataset", "config", "level", "entry")}
    try:
        value, readable = scorers().call(
            tuple[float, bool], "score_answer", answer=answer, cpu_s=library.CPU_S, **arguments
        )
    except AnswerLimitError:
        return Score(0.0, over_limit=True)
    return Score(value, unreadable=not readable)
