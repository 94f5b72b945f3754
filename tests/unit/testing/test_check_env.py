"""The contract check finds each fault that it says it looks for."""

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl import AsyncEnv, Env, Message, Task, ToolCall, ToolCalls, ToolResults, tool
from agentrl.core.env import Step
from agentrl.core.types import Action
from agentrl.testing import ContractError, check_env, contract


class Guess(Env):
    """Ends after three turns; says a random number each time; searches when told to."""

    stop = ("</search>",)
    tool_names = ("search",)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.turn = 0
        self.calls = 0
        return super().reset(seed=seed, options=options)

    def step(self, action: Action) -> Step:
        if isinstance(action, Message) and action.content.startswith("<search>"):
            self.calls += 1
            return ToolCalls((ToolCall(self.call_id(), "search", {"query": "x"}),)), 0.0, False, False, {}
        self.turn += 1
        heard = action.results[0].content if isinstance(action, ToolResults) else ""
        message = Message("user", f"{heard}{self.number()}")
        return (message,), self.reward(), self.turn == 3, False, {"metrics": self.metrics()}

    def call_id(self) -> str:
        return f"c{self.calls}"

    def number(self) -> int:
        return int(self.np_random.integers(1000))

    def reward(self) -> float:
        return 1.0

    def metrics(self) -> Any:
        return {"turns": float(self.turn)}

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "turn": self.turn, "calls": self.calls}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.turn, self.calls = state["turn"], state["calls"]


async def awaits_by_mistake(self: Env, *arguments: Any, **options: Any) -> Any:
    return (), 0.0, True, False, {}


@tool
def look_up(name: str) -> str:
    return name


def refers_to_itself(self: Guess) -> dict[str, Any]:
    state: dict[str, Any] = Guess.get_state(self)
    state["state"] = state
    return state


def raises(self: Guess) -> Any:
    return {}["x"]


def broken(**methods: Callable[..., Any] | Any) -> type[Env]:
    return type("Broken", (Guess,), methods)


shared: list[int] = []


def drawn_from_the_class(self: Guess) -> int:
    shared.append(1)
    return len(shared)


def test_a_good_environment_passes() -> None:
    check_env(Guess)
    check_env(Guess, task=Task("other", (Message("user", "Other?"),)))


def test_all_the_calls_are_answered_by_what_was_given() -> None:
    seen: list[str] = []

    def respond(call: ToolCall) -> Any:
        from agentrl import ToolResult, ToolStatus

        seen.append(call.name)
        return ToolResult(call.id, ToolStatus.OK, "found")

    check_env(Guess, respond=respond)
    assert set(seen) == {"search"}


@pytest.mark.parametrize(
    ("methods", "fault"),
    [
        ({"number": lambda self: random.randrange(1000)}, r"episode does not replay|gymnasium"),
        ({"number": lambda self: int(np.random.randint(2))}, r"does not replay|global random|gymnasium"),
        ({"number": lambda self: int(0 * random.random())}, r"global random generators"),
        ({"number": drawn_from_the_class}, r"does not replay|gymnasium"),
        ({"reward": lambda self: float("nan")}, r"finite float|gymnasium"),
        ({"reward": lambda self: 10**400}, r"finite float"),
        ({"metrics": lambda self: {"turns": 1}}, r"dict of finite floats by name"),
        ({"metrics": lambda self: {"turns": float("inf")}}, r"dict of finite floats by name"),
        ({"call_id": lambda self: "same"}, r"uses the call id 'same' twice"),
        ({"tool_names": ()}, r"calls 'search', which is neither in its tool_names"),
        ({"tool_names": ["search"]}, r"tool_names must be a tuple of strings"),
        ({"stop": ("",)}, r"stop must be a tuple of strings that are not empty"),
        ({"get_state": lambda self: {"turn": object()}}, r"get_state\['turn'\] must be JSON-able"),
        ({"get_state": lambda self: {**Guess.get_state(self), 1: 2}}, r"get_state changes when it goes through JSON"),
        ({"set_state": lambda self, state: Env.set_state(self, state)}, r"does not bring back the state"),
        ({"get_state": lambda self: {**Guess.get_state(self), "turn": 0}}, r"get_state leaves out .* step \d+ differs"),
        ({"get_state": Env.get_state}, r"Broken.set_state raised KeyError: 'turn' \(test_check_env.py:\d+\)"),
        (
            {"step": lambda self, action: ("text", 0.0, False, False, {})},
            r"step returned the observation 'text', which",
        ),
        ({"step": lambda self, action: ((), 0.0, False, {})}, r"step must return \(observation, reward, term"),
        ({"step": Env.step}, r"Broken defines no step\(action\)$"),
        ({"step": lambda self, action: {}["x"]}, r"Broken.step raised KeyError: 'x' \(test_check_env.py:\d+\)"),
        (
            {"step": lambda self, action: int(action.content)},
            r"raised ValueError.* for the action '.*'; it must take any",
        ),
        ({"number": lambda self: int("x" if self.turn == 2 else 1)}, r"Broken.step raised ValueError"),
        ({"reset": lambda self, seed=None, options=None: {}["x"]}, r"Broken.reset raised KeyError: 'x' \(test_ch"),
        ({"reset": lambda self, seed=None, options=None: "Hi"}, r"Broken.reset must return \(observation, info\)"),
        ({"reset": lambda self, seed=None, options=None: ("Hi", {})}, r"Broken.reset returned the observation 'Hi'"),
        ({"get_state": lambda self: {}["x"]}, r"Broken.get_state raised KeyError: 'x' \(test_check_env.py:\d+\)"),
        ({"__init__": lambda self: {}["x"]}, r"Broken's constructor raised KeyError: 'x' \(test_check_env.py:\d+\)"),
        (
            {"step": awaits_by_mistake},
            r"Broken defines step as a coroutine, .*; define async astep in a subclass of agentrl",
        ),
        ({"close": awaits_by_mistake}, r"Broken defines close as a coroutine, .*; define async aclose in a subclass"),
        ({"get_state": awaits_by_mistake}, r"Broken defines get_state as a coroutine, .*; write it without async"),
        ({"example_task": classmethod(awaits_by_mistake)}, r"Broken defines example_task as a coroutine"),
        (
            {"example_task": lambda self: "Say hello."},
            r"Broken.example_task must return a Task, it returned 'Say hello.'",
        ),
        ({"get_state": refers_to_itself}, r"Broken.get_state must be JSON-able: Circular reference"),
        (
            {"tools": [len]},
            r"Broken.tools must be a tuple of Tools, which @agentrl.tool makes, not \[<built-in function len>\]",
        ),
        (
            {"tools": (look_up, look_up)},
            r"Broken.tools has two tools of the name 'look_up', and calls say only the name",
        ),
        ({"tasks": lambda self, split, seed: ()}, r"Broken defines tasks without @classmethod$"),
        ({"tools": None}, r"Broken.tools must be a tuple of Tools, which @agentrl.tool makes, not None"),
        ({"tools": property(raises)}, r"Broken.tools raised KeyError: 'x' \(test_check_env.py:\d+\)"),
        ({"stop": property(raises)}, r"Broken.stop raised KeyError: 'x' \(test_check_env.py:\d+\)"),
        ({"observation_space": None}, r"Broken.observation_space must be a gymnasium.Space, it is None"),
        ({"action_space": "text"}, r"Broken.action_space must be a gymnasium.Space, it is 'text'"),
        ({"reset": lambda self, seed=None, options=None: ((), {})}, r"Broken.reset returned no message"),
        (
            {"step": lambda self, action: ((), 0.0, True, False, {"final_answer": 4})},
            r"info\['final_answer'\] must be a str, it is 4",
        ),
        ({"close": lambda self: {}["x"]}, r"Broken.close raised KeyError: 'x'|gymnasium"),
        (
            {"step": lambda self, action: ((), 0.0, True, False, {"x": float("nan"), "y": 1})},
            r"Broken: info\['x'\] must be JSON-able: .*; it is nan$",
        ),
        ({"step": lambda self, action: ((), 0.0, "False", False, {})}, r"step returned terminated='False', which must"),
        (
            {"reward": lambda self: os.chdir("/") or 0.0},
            r"Broken.step changes the working directory to /, for the whole process; use absolute paths$",
        ),
    ],
)
def test_a_fault_is_named(methods: dict[str, Any], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ContractError, match=fault) as raised:
        check_env(broken(**methods))
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_an_async_method_that_is_no_coroutine_is_named() -> None:
    class Awaited(AsyncEnv):
        def astep(self, action: Action) -> Step:  # type: ignore[override]
            return (), 0.0, True, False, {}

    with pytest.raises(ContractError, match=r"Awaited defines astep as no coroutine, .*; write async def astep"):
        check_env(Awaited)


def test_a_method_that_does_not_return_is_named_meanwhile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(contract, "SLOW_S", 0.01)

    def wait_for_the_log(self: Guess) -> float:
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
        return 1.0

    check_env(broken(reward=wait_for_the_log))
    assert "Broken.step has not returned for 0.01 s" in caplog.messages


def test_an_environment_without_a_state_of_its_own_passes_with_a_note() -> None:
    assert check_env(Guess) == ()
    (note,) = check_env(broken(get_state=Env.get_state, set_state=Env.set_state))
    assert note.startswith("Broken keeps a state and defines no get_state and set_state")
    assert "training, evaluation" in note
    assert len(note) < 250

    class Stateless(Guess):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            return Env.reset(self, seed=seed, options=options)

        def step(self, action: Action) -> Step:
            return (Message("user", str(self.number())),), 0.0, self.number() < 500, False, {}

        get_state, set_state = Env.get_state, Env.set_state

    assert check_env(Stateless) == (), "the generator's state is all that it has"


def test_what_is_no_environment_is_refused() -> None:
    with pytest.raises(ContractError, match="dict must be a subclass"):
        check_env(dict)  # type: ignore[arg-type]


def test_the_states_go_through_json() -> None:
    env = Guess()
    env.reset(seed=1)
    assert json.loads(json.dumps(env.get_state())) == env.get_state()
