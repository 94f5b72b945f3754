"""Environments of Gymnasium: texts of observations and actions by space, limits, seeds, and episodes at the same time."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env as gymnasium_check_env
from PIL import Image as pil

from agentrl import ConfigError, Message, Task
from agentrl.adapters.base import ActionError, value_text
from agentrl.adapters.gymnasium import GymnasiumEnv
from agentrl.adapters.gymnasium.space_text import ActionText, check_observations, rendered_text
from agentrl.core.errors import UnknownNameError
from agentrl.core.images import IMAGE_MARK, Image, load_image
from agentrl.core.types import StopReason, message_with_images
from agentrl.testing import check_env, play_episode

NAMES = ("left", "down", "right", "up")
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "kwargs": {"is_slippery": False},
    "observation": "ansi",
    "actions": NAMES,
}


class Echo(gymnasium.Env[dict[str, Any], str]):
    """Returns the text that it gets, and a picture with it; three steps."""

    observation_space = spaces.Dict({"text": spaces.Text(20), "picture": spaces.Box(0, 255, (64, 64, 3), np.uint8)})
    action_space = spaces.Text(5, charset="abc")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.texts = [str((options or {}).get("first", "begin"))]
        return self._observe(), {}

    def step(self, action: str) -> Any:
        self.texts.append(action)
        done = len(self.texts) == 4
        return self._observe(), np.float32(len(action)), np.bool_(done), False, {"metrics": {"texts": len(self.texts)}}

    def _observe(self) -> dict[str, Any]:
        return {"text": self.texts[-1], "picture": np.zeros((64, 64, 3), np.uint8)}


def show_text(observation: dict[str, Any], info: dict[str, Any]) -> str:
    return f"You said {observation['text']}."


def shout(text: str) -> str:
    if text != "go":
        raise ValueError(f"say go, and not {text}")
    return "abc"


ECHO: dict[str, Any] = {"id": f"{Path(__file__)}:Echo", "observation": f"{Path(__file__)}:show_text"}


@pytest.mark.parametrize(
    "options",
    [LAKE, {"id": "Blackjack-v1"}, {"id": "Taxi-v4", "max_steps": 5}, {"id": "Pendulum-v1"}, ECHO],
    ids=lambda options: options["id"].rpartition(":")[2],
)
def test_contract(options: dict[str, Any]) -> None:
    env = partial(GymnasiumEnv, **options)
    assert check_env(env) == ()
    gymnasium_check_env(env(), skip_render_check=True)


def test_an_episode_of_frozen_lake() -> None:
    script = ["<think>a</think><action>down</action>", "1", "jump", "<action>Right</action>", "1", "2", "right"]
    rollout = play_episode(partial(GymnasiumEnv, prompt="Reach G.", **LAKE), Task("t", ()), script)
    assert (rollout.reward, rollout.stop_reason) == (1.0, StopReason.TERMINATED), [
        turn.observation for turn in rollout.turns
    ]
    assert rollout.metrics == {"steps": 6.0, "invalid_turns": 1.0}


def test_the_prompt_is_that_of_the_task_or_of_the_options() -> None:
    env = GymnasiumEnv(prompt="Reach G.", **LAKE)
    (first,), _ = env.reset(seed=0)
    assert first.content.startswith("Reach G.\n\nEnd your answer with <action>…</action> around one of left, down,")
    assert first.content.endswith("[S]FFF\nFHFH\nFFFH\nHFFG"), "the colour that marks the player is in brackets"
    task = Task("t", (Message("system", "Play."), Message("user", "Now!")), metadata={"seed": 3})
    messages, _ = env.reset(seed=0, options={"task": task})
    assert [message.role for message in messages] == ["system", "user"]
    assert messages[-1].content.startswith("Now!\n\nEnd")


def test_metadata_of_a_task_sets_seed_and_options_of_reset() -> None:
    hands = set()
    for seed in range(4):
        env = GymnasiumEnv("Blackjack-v1")
        (message,), _ = env.reset(seed=seed, options={"task": Task("t", (), metadata={"seed": 7})})
        hands.add(message.content)
    assert len(hands) == 1
    env = GymnasiumEnv(**ECHO)
    (message,), _ = env.reset(seed=0, options={"task": Task("t", (), metadata={"options": {"first": "other"}})})
    assert message.content.endswith("You said other.")


def test_turns_that_are_no_actions_are_answered_and_limited() -> None:
    env = GymnasiumEnv(invalid_cost=0.25, max_invalid=2, **ECHO)
    env.reset(seed=0)
    (message,), reward, terminated, truncated, _ = env.step(Message("assistant", "xyz"))
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert message.content == (
        "That is no action: it has the characters 'xyz', which are not allowed. Answer with the text of your action alone."
    )
    assert env.step(Message("assistant", "ab"))[1] == 2.0
    assert env.step(Message("assistant", "abcabc"))[2] is False, "two in a row end the episode, and this is the first"
    _, reward, terminated, _, info = env.step(Message("assistant", ""))
    assert (reward, terminated) == (-0.25, True)
    assert info["metrics"] == {"steps": 1.0, "invalid_turns": 3.0, "texts": 2.0}


def test_steps_are_limited_by_truncation() -> None:
    env = GymnasiumEnv("CartPole-v1", max_steps=2)
    env.reset(seed=0)
    assert env.step(Message("assistant", "1"))[2:4] == (False, False)
    assert env.step(Message("assistant", "0"))[2:4] == (False, True)


def test_a_function_reads_actions() -> None:
    env = GymnasiumEnv(action=f"{Path(__file__)}:shout", **ECHO)
    env.reset(seed=0)
    assert env.step(Message("assistant", "stop"))[0][0].content == "That is no action: say go, and not stop."
    assert env.step(Message("assistant", "go"))[1] == 3.0


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.Discrete(3, start=5), "so <action>1</action> no <action> 6 </action>", 6),
        (spaces.MultiDiscrete([2, 3]), "[1, 2]", [1, 2]),
        (spaces.MultiBinary(3), "[1, 0, 1]", [1, 0, 1]),
        (spaces.Box(-1, 1, (2,)), "<action>[0.5, -1]</action>", [0.5, -1.0]),
        (spaces.Box(-1, 1, (1,)), "0.5", [0.5]),
        (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Text(3)}), '{"a": 1, "b": "xy"}', {"a": 1, "b": "xy"}),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 9, (2,), np.int64)]), "[1, [3, 4]]", (1, [3, 4])),
    ],
)
def test_texts_as_actions(space: spaces.Space[Any], text: str, action: Any) -> None:
    parsed = ActionText(space).parse(text)
    assert space.contains(parsed), "Gymnasium itself says that it is an action"
    assert repr(_plain(parsed)) == repr(action)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


@pytest.mark.parametrize(
    ("space", "text", "fault"),
    [
        (spaces.Discrete(3, start=5), "4", "the action is 4, which is outside of 5 to 7"),
        (spaces.Discrete(3), "²", "'²' is no action"),
        (spaces.Discrete(3), "9" * 30, "is no action"),
        (spaces.Discrete(3), "<action></action>", "the answer is empty"),
        (spaces.MultiDiscrete([2, 3]), "[1, 3]", "outside of"),
        (spaces.MultiDiscrete([2, 3]), "[1, 1.5]", "whole numbers"),
        (spaces.MultiBinary(2), "[true, 0]", "numbers in the shape"),
        (spaces.Box(-1, 1, (2,)), "[NaN, 0]", "outside of"),
        (spaces.Box(-1, 1, (2,)), '["0.5", 0]', "numbers in the shape"),
        (spaces.Box(-1, 1, (2,)), "[[0], 0]", "numbers alone"),
        (spaces.Box(-1, 1, (2,)), "[" * 100_000, "is no JSON"),
        (spaces.Dict({"a": spaces.Discrete(2)}), '{"b": 1}', "exactly the keys a"),
        (spaces.Tuple([spaces.Discrete(2)]), "[1, 1]", "an array of 1 values"),
        (spaces.Dict({"b": spaces.Text(3)}), '{"b": 1}', "must be a string"),
    ],
)
def test_texts_that_are_no_actions(space: spaces.Space[Any], text: str, fault: str) -> None:
    with pytest.raises(ActionError, match=fault) as caught:
        ActionText(space).parse(text)
    assert len(str(caught.value)) < 300


def test_random_actions_of_every_space_are_read_again() -> None:
    space = spaces.Dict(
        {
            "where": spaces.Tuple([spaces.Discrete(4), spaces.MultiDiscrete([3, 3])]),
            "how": spaces.Box(-2, 2, (2, 2)),
            "word": spaces.Text(8),
        }
    )
    space.seed(0)
    text = ActionText(space)
    for _ in range(50):
        action = space.sample()
        parsed = text.parse(f"<action>{value_text([action], 12)[1:-1]}</action>")
        assert space.contains(parsed)
        assert value_text(parsed, 6) == value_text(action, 6)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        (np.int64(3), "3"),
        ({"cards": (np.int8(2), True), "name": "x"}, "cards: [2, true]\nname: x"),
        (np.array([[1.23456, np.inf], [1e-9, 2]]), '[[1.235, "inf"], [1e-09, 2.0]]'),
    ],
)
def test_observations_as_texts(value: Any, text: str) -> None:
    assert value_text(value, 4) == text


def test_a_rendering_that_is_no_text_is_refused() -> None:
    assert rendered_text("\x1b[41mS\x1b[0mF\n\x1b[1mH\x1b[0m\n") == "[S]F\nH"
    with pytest.raises(ConfigError, match=r"render returned a ndarray, and no text"):
        rendered_text(np.zeros(3))


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'FrozenLake-v1'\?"):
        GymnasiumEnv("FrozenLake")
    with pytest.raises(
        ConfigError, match=r"observations 'picture' .* shape \(64, 64, 3\), 12288 numbers.*observation to"
    ):
        GymnasiumEnv(ECHO["id"])
    with pytest.raises(ConfigError, match=r"have no text|which has no text"):
        check_observations(spaces.Graph(spaces.Discrete(2), None))
    with pytest.raises(ConfigError, match=r"env\.options\.actions has 2 names, and env\.options\.id has 4 actions"):
        GymnasiumEnv("FrozenLake-v1", actions=["left", "right"])
    with pytest.raises(ConfigError, match="a name twice"):
        ActionText(spaces.Discrete(2), ["up", "Up"])
    with pytest.raises(ConfigError, match=r"env\.options\.action to a function"):
        ActionText(spaces.Graph(spaces.Discrete(2), None))
    with pytest.raises(ConfigError, match=r"env\.options\.id=FrozenLake-v1 with .*size.* raised TypeError"):
        GymnasiumEnv("FrozenLake-v1", {"size": 3})
    with pytest.raises(ConfigError, match=r"max_steps=0 must be at least 1"):
        GymnasiumEnv("FrozenLake-v1", max_steps=0)


async def _play_64(env_factory: Any) -> list[str]:
    """Play 64 episodes of random moves in threads; return what was read in each."""

    def play(seed: int) -> str:
        env = env_factory()
        env.reset(seed=seed)
        moves = np.random.default_rng(seed)
        texts = []
        for _ in range(20):
            (message,), _, terminated, truncated, _ = env.step(Message("assistant", str(moves.integers(4))))
            texts.append(message.content)
            if terminated or truncated:
                break
        return "\n".join(texts)

    return await asyncio.gather(*(asyncio.to_thread(play, seed) for seed in range(64)))


def test_64_episodes_at_the_same_time_replay() -> None:
    slippery = partial(GymnasiumEnv, "FrozenLake-v1", observation="ansi")
    together = asyncio.run(_play_64(slippery))
    assert together == asyncio.run(_play_64(slippery))
    assert len(set(together)) > 30


class Painter(gymnasium.Env[Any, Any]):
    """Shows a picture that is as bright as the steps that were made; three steps."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012
    action_space = spaces.Discrete(2)

    def __init__(
        self, render_mode: str | None = None, pixels: bool = False, shape: tuple[int, ...] = (20, 30, 3)
    ) -> None:
        self.render_mode, self._shape = render_mode, shape
        self.observation_space = spaces.Box(0, 255, shape, np.uint8) if pixels else spaces.Text(9)
        self._pixels = pixels

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return self._observe(), 1.0, self._steps == 3, False, {}

    def _observe(self) -> Any:
        return self.render() if self._pixels else f"{self._steps}{IMAGE_MARK}"

    def render(self) -> Any:
        return np.full(self._shape, 20 * self._steps, np.uint8)


PAINTER: dict[str, Any] = {"id": f"{Path(__file__)}:Painter", "images": True}


def painted(steps: int) -> Image:
    return load_image(pil.new("RGB", (30, 20), (20 * steps,) * 3))


@pytest.mark.parametrize("pixels", [False, True])
def test_frames_are_images_behind_the_text(pixels: bool) -> None:
    env = GymnasiumEnv(**PAINTER, kwargs={"pixels": pixels})
    picture = message_with_images("user", "Play:", painted(9))
    observation, _ = env.reset(seed=1, options={"task": Task("t", (Message("system", "!"), picture))})
    assert isinstance(observation, tuple)
    first = observation[1]
    assert isinstance(first, Message)
    assert first.images == (painted(9), painted(0)), "the task's own picture stays"
    text = "" if pixels else "\n\n0\N{REPLACEMENT CHARACTER}"
    assert first.content.startswith(f"Play:{IMAGE_MARK}\n\nEnd your answer with <action>")
    assert first.content.endswith(f"from 0 to 1.{text}\n\n{IMAGE_MARK}")
    [answer] = env.step(Message("assistant", "1"))[0]
    assert answer == Message(
        "user", ("" if pixels else "1\N{REPLACEMENT CHARACTER}\n\n") + IMAGE_MARK, images=(painted(1),)
    )
    [refusal] = env.step(Message("assistant", "7"))[0]
    assert refusal.images == ()
    assert check_env(partial(GymnasiumEnv, **PAINTER, kwargs={"pixels": pixels})) == ()


def test_what_renders_no_picture_is_refused() -> None:
    env = GymnasiumEnv(**PAINTER, kwargs={"shape": (4, 6)})
    with pytest.raises(ConfigError, match=r"rgb_array returned uint8 \(4, 6\), and no array"):
        env.reset(seed=1, options={"task": Task("t", ())})
    with pytest.raises(ConfigError, match="renders in one way"):
        GymnasiumEnv(**PAINTER, observation="ansi")
