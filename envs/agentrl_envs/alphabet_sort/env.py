"""A user who adds names to a list in each turn; the policy answers with the whole list in order."""

from __future__ import annotations

from typing import Any

from agentrl import Action, ConfigError, Env, Info, Message, Observation, Step, Task, TaskError
from agentrl.rewards.similarity import similarity


class AlphabetSortEnv(Env):
    """The reward of a turn is how similar the policy's list is to the right one, to a power; that of the episode is their mean.

    A task's ``answer`` has the right list of each turn, and ``metadata["user_turns"]`` what the user says after the first one.

    Args:
        power: of the similarity, 0 to 1: the higher, the less a list with faults gets.
    """

    def __init__(self, power: float = 4.0) -> None:
        """Set the power.

        Raises:
            ConfigError: it is not above 0.
        """
        if not power > 0:
            raise ConfigError(f"env.options.power={power} must be above 0")
        self.power = power

    @classmethod
    def example_task(cls) -> Task:
        """Return a task of two turns."""
        return Task(
            "alphabet_sort/example",
            (Message("user", "Sort these names by first name, one on each line:\nIvy Cole\nAda Reed"),),
            answer=["Ada Reed\nIvy Cole", "Ada Reed\nBen Hill (new)\nIvy Cole"],
            metadata={
                "user_turns": [
                    "Add these names to the list, keep it in order, and write (new) behind each of them:\nBen Hill"
                ]
            },
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Start an episode with the first names.

        Raises:
            TaskError: the task has not one answer for each turn.
        """
        prompt, info = super().reset(seed=seed, options=options)
        self.user_turns = list(self.task.metadata.get("user_turns", ()))
        if not isinstance(self.task.answer, list | tuple) or len(self.task.answer) != len(self.user_turns) + 1:
            raise TaskError(
                f"task {self.task.id!r} has {len(self.user_turns) + 1} turns, and its answer is {self.task.answer!r:.100}: a "
                "list with the right text of each turn is needed"
            )
        self.scores: list[float] = []
        self.exact = 0
        return prompt, info

    def step(self, action: Action) -> Step:
        """Score a list; return the next names, or end the episode."""
        assert isinstance(action, Message), "there are no tools"
        text, right = action.content.strip(), str(self.task.answer[len(self.scores)])
        self.scores.append(similarity(text, right) ** self.power)
        self.exact += text == right
        turns = len(self.task.answer)
        info: Info = {"metrics": {"exact": self.exact / turns}}
        if len(self.scores) < turns:
            return (Message("user", self.user_turns[len(self.scores) - 1]),), 0.0, False, False, info
        return (), sum(self.scores) / turns, True, False, info

    def get_state(self) -> dict[str, Any]:
        """Return the scores so far."""
        return {**super().get_state(), "scores": list(self.scores), "exact": self.exact}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on with the scores so far."""
        super().set_state(state)
        self.user_turns = list(self.task.metadata.get("user_turns", ()))
        self.scores, self.exact = list(state["scores"]), state["exact"]
