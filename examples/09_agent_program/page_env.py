"""The same task as an environment: what `agent.py` does, and what `page_rewards.py` gives, in one class."""

import re
from typing import Any

from agentrl import Action, Env, Info, Message, Observation, Step, Task


class PageEnv(Env):
    """A quarter for each page that is searched for, half for the right answer.

    Args:
        prompt: text with ``{prompt}``, the question.
    """

    stop = ("</search>", "</answer>")

    def __init__(self, prompt: str = "{prompt}") -> None:
        self.prompt = prompt
        self.pages: set[str] = set()

    @classmethod
    def example_task(cls) -> Task:
        """Return a question with its pages."""
        pages = {"Dara Tofe": "Dara Tofe works for Nalecorp.", "Nalecorp": "Nalecorp is based in Remuburg."}
        question = (Message("user", "What is the seat of the employer of Dara Tofe?"),)
        return Task("example", question, answer="Remuburg", metadata={"pages": pages})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        """Ask the question."""
        super().reset(seed=seed, options=options)
        self.pages = set()
        return (Message("user", self.prompt.replace("{prompt}", self.task.question)),), self.metrics(right=False)

    def step(self, action: Action) -> Step:
        """Show the page that is searched for, or end with the answer."""
        assert isinstance(action, Message), "it has no tools"
        move = re.search(r"<(search|answer)> *([^<]*)", action.content)
        name = "" if move is None else move[2].strip()
        if move is None or move[1] == "answer":
            right = move is not None and name == self.task.answer
            return (), right / 2, True, False, self.metrics(right=right)
        pages = self.task.metadata["pages"]
        reward = 0.25 if name in pages and name not in self.pages else 0.0
        self.pages |= {name} & set(pages)
        text = f"<information>{pages.get(name, 'There is no such page.')}</information>"
        return (Message("user", text),), reward, False, False, self.metrics(right=False)

    def metrics(self, *, right: bool) -> Info:
        """Return the metrics so far."""
        return {"metrics": {"pages": float(len(self.pages)), "right": float(right)}}

    def get_state(self) -> dict[str, Any]:
        """Return the pages so far."""
        return {**super().get_state(), "pages": sorted(self.pages)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore them."""
        super().set_state(state)
        self.pages = set(state["pages"])
