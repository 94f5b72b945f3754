"""An environment with its own tasks, intermediate rewards, and no tool."""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any, ClassVar

from agentrl_envs.search_r1.protocol import PROMPT

from agentrl import Action, Env, Info, Message, Observation, Step, Task, register_env

LINKS = {
    "spouse": "is married to",
    "employer": "works for",
    "founder": "was founded by",
    "seat": "is based in",
    "mayor": "is governed by",
}
TRAILS = (("spouse", "employer", "seat"), ("employer", "founder", "spouse"), ("employer", "seat", "mayor"))
ENDINGS = {"employer": ("corp", "works", "tex"), "seat": ("burg", "ton", "ville", "ford")}


@register_env("trail")
class Trail(Env):
    """Follow a trail of signposts: ``<search> name </search>`` goes there, ``<answer> name </answer>`` ends the walk.

    Every stage, reached in order, has a reward of a quarter, and so has the right answer at the end.
    """

    stop: ClassVar[tuple[str, ...]] = ("</search>", "</answer>")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed, options=options)
        self.reached = 0
        return self.task.prompt, self._info()

    def step(self, action: Action) -> Step:
        assert isinstance(action, Message), "without tools every action is a turn of the policy"
        match = re.search(r"<(search|answer)> ([^<]*) </\1>", action.content)
        names: Sequence[str] = self.task.metadata["names"]
        if match is None:
            return (), 0.0, True, False, self._info()
        if match[1] == "answer":
            right = float(match[2] == names[-1])
            return (), 0.25 * right, True, False, self._info(right)
        onward = self.reached < len(names) - 1 and match[2] == names[self.reached]
        self.reached += onward
        sign = self._signpost(match[2])
        return (Message("user", sign, inline=True),), 0.25 * onward, False, False, self._info()

    def _signpost(self, name: str) -> str:
        """The signpost at ``name``: the next stage of the trail, and a wrong way."""
        names, links = self.task.metadata["names"], self.task.metadata["links"]
        if name not in names[:-1]:
            return "\n\n<information>There is no such place.</information>\n\n"
        at = names.index(name)
        ways = [f"{LINKS[links[at]]} {names[at + 1]}", f"was visited by {_word(Random(name))}"]
        order = self.np_random.permutation(2)
        text = f"{name} {ways[order[0]]}, {ways[order[1]]}."
        return f'\n\n<information>Doc 1(Title: "{name}") {text}</information>\n\n'

    def _info(self, right: float = 0.0) -> Info:
        return {"metrics": {"right": right, "reached": float(self.reached)}}

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        rng = Random(f"{split}/{seed if split == 'train' else 0}")
        return [_task(rng, f"trail/{split}/{i}", TRAILS[i % len(TRAILS)]) for i in range(512)]

    @classmethod
    def example_task(cls) -> Task:
        return _task(Random(0), "example", TRAILS[0])

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "reached": self.reached}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.reached = state["reached"]


def _task(rng: Random, name: str, links: tuple[str, ...]) -> Task:
    names = [_name(rng, "spouse"), *(_name(rng, link) for link in links)]
    chain = " of ".join(f"the {link}" for link in reversed(links))
    prompt = Message("user", PROMPT.replace("{question}", f"What is {chain} of {names[0]}?"))
    return Task(name, (prompt,), names[-1], {"names": names, "links": list(links)})


def _name(rng: Random, link: str) -> str:
    return _word(rng) + rng.choice(ENDINGS[link]) if link in ENDINGS else f"{_word(rng)} {_word(rng)}"


def _word(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2)).capitalize()
