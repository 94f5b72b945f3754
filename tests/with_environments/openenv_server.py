"""A server of OpenEnv with a small environment: ``python openenv_server.py KIND CAPACITY`` prints its port.

Runs with the Python of an environment that has openenv installed, and imports nothing else.
"""

import random
import socket
import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_fastapi_app,
)
from pydantic import Field


class Guess(Action):
    text: str = Field(min_length=1)


class Hint(Observation):
    hint: str = ""


class Move(Action):
    x: int = Field(ge=0, le=9)
    y: int = Field(ge=0, le=9)


class Board(Observation):
    row: list[int] = Field(default_factory=list)
    note: str | None = None


class GuessEnvironment(Environment):
    """Guess a number up to 100; ``crash`` raises, ``die`` ends the process."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def list_splits(self) -> list[Any]:
        return [{"name": "train", "type": "train"}, {"name": "held_out", "type": "validation"}]

    def num_tasks(self, split: str) -> int:
        return {"train": 50, "held_out": 7}[split]

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        split, index = options.get("split"), options.get("index")
        self.number = random.Random(seed).randint(1, 100) if split is None else len(split) * 10 + index
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Hint(hint=f"{options.get('greeting', 'Guess')} a number up to 100.")

    def step(self, action: Guess, timeout_s: float | None = None, **options: Any) -> Hint:
        if action.text == "crash":
            raise ValueError("no such guess")
        if action.text == "die":
            import os

            os._exit(1)
        self._state.step_count += 1
        if not action.text.isdecimal():
            return Hint(hint="That is no number.")
        guess = int(action.text)
        if guess == self.number:
            return Hint(hint="Right.", done=True, reward=1.0)
        if self._state.step_count == 20:
            return Hint(hint="Too late.", done=True, reward=0.0, metadata={"truncated": True})
        return Hint(hint="Higher." if guess < self.number else "Lower.", reward=0.01)

    @property
    def state(self) -> State:
        return self._state


class GridEnvironment(Environment):
    """One step; the reward is what its action says, so that it needs no session."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Board:
        return Board(row=[0, 1])

    def step(self, action: Move, timeout_s: float | None = None, **options: Any) -> Board:
        return Board(row=[action.x, action.y], note="over", done=True, reward=action.x / 10)

    @property
    def state(self) -> State:
        return State()


class CounterEnvironment(MCPEnvironment):
    """Tools ``add`` and ``submit``; the reward is 1 for a total of the number that reset names."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("counter")
        self.total = 0

        @server.tool
        def add(number: int) -> str:
            """Add a number."""
            if number < 0:
                raise ValueError("no negative numbers")
            self.total += number
            return f"The total is {self.total}."

        @server.tool
        def submit() -> str:
            """End the game."""
            return "submitted"

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Hint:
        self.total = 0
        self.goal = random.Random(seed).randint(3, 9)
        return Hint(hint=f"Bring the total to {self.goal}, then submit.")

    def _finish(self, action: Any, observation: Observation) -> Observation:
        if isinstance(action, CallToolAction) and action.tool_name == "submit":
            observation.done, observation.reward = True, float(self.total == self.goal)
        return observation

    def step(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._finish(action, super().step(action, timeout_s=timeout_s, **options))

    async def step_async(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        return self._finish(action, await super().step_async(action, timeout_s=timeout_s, **options))

    def _step_impl(self, action: Any, timeout_s: float | None = None, **options: Any) -> Observation:
        raise ValueError(f"no tool call: {action}")

    @property
    def state(self) -> State:
        return State()


KINDS = {
    "guess": (GuessEnvironment, Guess, Hint),
    "grid": (GridEnvironment, Move, Board),
    "counter": (CounterEnvironment, CallToolAction, CallToolObservation),
}


def main() -> None:
    environment, action, observation = KINDS[sys.argv[1]]
    app = create_fastapi_app(environment, action, observation, max_concurrent_envs=int(sys.argv[2]))
    with socket.create_server(("127.0.0.1", 0), backlog=256) as listener:
        print(listener.getsockname()[1], flush=True)
        config = uvicorn.Config(app, log_level="warning")
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
