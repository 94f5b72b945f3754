"""An environment whose policy calls a tool, and chats that show how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentrl import Action, Env, Info, Message, Observation, Step, Task, Tool, tool


def _word(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2))


def _meaning(word: str) -> str:
    return _word(Random(word))


@tool(timeout_s=5)
async def look_up(word: str) -> str:
    """Look a word up."""
    return _meaning(word)


class Words(Env):
    """The reward is 1 for the meaning of the word, which only `look_up` knows."""

    tools: tuple[Tool, ...] = (look_up,)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Observation, Info]:
        super().reset(seed=seed, options=options)
        return self.task.prompt, {"metrics": {"right": 0.0}}

    def step(self, action: Action) -> Step:
        right = float(isinstance(action, Message) and action.content.strip() == self.task.answer)
        return (), right, True, False, {"metrics": {"right": right}}

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        rng = Random(split)
        words = [_word(rng) for _ in range(200)]
        return [Task(f"{split}/{i}", _ask(word), answer=_meaning(word)) for i, word in enumerate(words)]


def _ask(word: str) -> tuple[Message, ...]:
    return (Message("user", f"What is {word}?"),)


def write_chats(path: Path, count: int) -> None:
    """Write chats in which the assistant looks the word up and says what it has found."""
    rng = Random(0)
    schema = {"name": look_up.name, "description": look_up.description, "parameters": dict(look_up.parameters)}
    with path.open("w", encoding="utf-8") as file:
        for _ in range(count):
            word = _word(rng)
            call = {
                "id": "c1",
                "type": "function",
                "function": {"name": "look_up", "arguments": json.dumps({"word": word})},
            }
            messages = [
                {"role": "user", "content": _ask(word)[0].content},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": _meaning(word)},
                {"role": "assistant", "content": _meaning(word)},
            ]
            tools = [{"type": "function", "function": schema}]
            file.write(json.dumps({"messages": messages, "tools": tools}) + "\n")


if __name__ == "__main__":
    write_chats(Path("chats.jsonl"), 400)
