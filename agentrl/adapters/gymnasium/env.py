"""Adapter of Gymnasium's environments."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import gymnasium
from typing_extensions import override

from agentrl.adapters.base import (
    InvalidTurns,
    Json,
    SeededTasks,
    load_function,
    opening,
    text_after_reasoning,
    value_text,
)
from agentrl.adapters.gymnasium.space_text import (
    ActionText,
    check_observations,
    has_text,
    rendered_image,
    rendered_text,
)
from agentrl.core.env import Env, Step
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.extras import require
from agentrl.core.images import Image
from agentrl.core.imports import is_reference, load_module, load_object
from agentrl.core.task import Task
from agentrl.core.types import Action, Info, Message, Observation
from agentrl.core.user_code import calling

ANSI = "ansi"
"""Value of ``env.options.observation`` for an environment's own text rendering."""
RGB_ARRAY = "rgb_array"
"""Render mode of images."""
AnyEnv = gymnasium.Env[Any, Any]
_VERSIONED = re.compile(r"-v\d+$")


class GymnasiumEnv(Env):
    """An environment of Gymnasium: observations become texts, and the text of a turn becomes an action.

    Args:
        id: its id, such as ``FrozenLake-v1``; with the module that registers it, ``my_package:Maze-v0``; or a class or function
            that returns an environment, ``file.py:Maze``.
        kwargs: keyword arguments of the environment.
        max_steps: steps after which an episode is truncated, in place of the environment's own limit.
        prompt: text in front of the first observation.
        observation: ``ansi``, or a function ``(observation, info) -> str`` as ``file.py:function``; by default a rule by space.
        images: what ``render`` returns (``rgb_array``) is an image behind the text of each observation; observations whose space
            has no text are the image alone.
        action: a function ``(text) -> action``, which raises a ValueError with a text for the policy, as ``file.py:function``;
            by default a rule by space.
        actions: names of the actions of a discrete space.
        digits: significant digits of fractions in observations.
        invalid_cost: is taken from the reward for each turn that is no action.
        max_invalid: turns in a row that are no actions, with the last of which the episode ends.
    """

    def __init__(  # all options of the environment
        self,
        id: str,
        kwargs: Json | None = None,
        *,
        max_steps: int | None = None,
        prompt: str = "",
        observation: str | None = None,
        images: bool = False,
        action: str | None = None,
        actions: Sequence[str] = (),
        digits: int = 4,
        invalid_cost: float = 0.0,
        max_invalid: int = 3,
    ) -> None:
        """Make an environment.

        Raises:
            UnknownNameError: Gymnasium has none of the id.
            ConfigError: it cannot be made, an option does not fit it, or its spaces have no text.
            MissingError: with ``images`` Pillow is not installed.
        """
        for name, number in (("max_steps", max_steps), ("digits", digits)):
            if number is not None and number < 1:
                raise ConfigError(f"env.options.{name}={number} must be at least 1")
        options = dict(kwargs or {})
        if images:
            require("PIL", "env.options.images=true")
            if observation == ANSI:
                raise ConfigError(
                    "env.options.images=true with env.options.observation=ansi: an environment renders in one way; leave out one"
                )
        if images or observation == ANSI:
            options["render_mode"] = RGB_ARRAY if images else ANSI
        self._env = _make(id, options, max_steps)
        self._prompt = prompt
        self._digits = digits
        self._is_rendered = observation == ANSI
        self._to_text: Callable[[Any, Info], str] | None = None
        if observation is not None and observation != ANSI:
            self._to_text = load_function(observation, "env.options.observation")
        self._has_images = images
        self._has_text = observation is not None or not images or has_text(self._env.observation_space)
        if observation is None and not images:
            check_observations(self._env.observation_space)
        self._parse: Callable[[str], Any]
        if action is None:
            text_actions = ActionText(self._env.action_space, actions)
            self._parse, self._rule = text_actions.parse, text_actions.rule
        else:
            self._parse, self._rule = load_function(action, "env.options.action"), ""
        self._invalid = InvalidTurns(invalid_cost, max_invalid, self._rule)

    @classmethod
    @override
    def tasks(cls, split: str, seed: int) -> SeededTasks:
        """Return 1000 tasks; the seed of an episode decides about its start."""
        return SeededTasks("gymnasium", split)

    @classmethod
    @override
    def example_task(cls) -> Task:
        return Task("gymnasium/example", ())

    @override
    def reset(self, *, seed: int | None = None, options: Json | None = None) -> tuple[Observation, Info]:
        """Start an episode. Metadata ``seed`` and ``options`` of the task are those of the environment's ``reset``."""
        super().reset(seed=seed, options=options)
        self._start(self._reset_seed())
        prompt = self.task.prompt or ((Message("user", self._prompt),) if self._prompt else ())
        text = self._observation_text(self._first, self._info)
        return opening(prompt, self._rule, text, image=self._frame()), {}

    def _reset_seed(self) -> int:
        seed = self.task.metadata.get("seed")
        return int(self.np_random.integers(2**31)) if seed is None else int(seed)

    def _start(self, seed: int) -> None:
        self._seed = seed
        self._turns: list[str] = []
        self._steps = 0
        self._invalid.clear()
        options = self.task.metadata.get("options")
        self._first, self._info = self._env.reset(seed=seed, options=None if options is None else dict(options))

    @override
    def step(self, action: Action) -> Step:
        """Take the action of a turn; a turn that is none is answered, and leaves the environment as it is."""
        assert isinstance(action, Message), "it requests no tools"
        text = text_after_reasoning(action)
        self._turns.append(text)
        try:
            parsed = self._parse(text)
        except ValueError as error:
            answer, cost, ended = self._invalid.refuse(str(error))
            return (answer,), cost, ended, False, self._metrics() if ended else {}
        self._invalid.end_row()
        self._steps += 1
        observation, reward, terminated, truncated, self._info = self._env.step(parsed)
        over = bool(terminated or truncated)
        added = opening((), self._observation_text(observation, self._info), image=self._frame())
        return added, float(reward), bool(terminated), bool(truncated), self._metrics() if over else {}

    def _metrics(self) -> Info:
        metrics = {"steps": float(self._steps), "invalid_turns": float(self._invalid.count)}
        names = self._info.get("metrics")
        env_metrics = names if isinstance(names, Mapping) else {}
        return {"metrics": metrics | {str(name): float(value) for name, value in env_metrics.items()}}

    def _observation_text(self, observation: object, info: Info) -> str:
        if not self._has_text:
            return ""
        if self._is_rendered:
            return rendered_text(self._env.render())
        if self._to_text is not None:
            return str(self._to_text(observation, info))
        return value_text(observation, self._digits) or "(nothing)"

    def _frame(self) -> Image | None:
        return rendered_image(self._env.render()) if self._has_images else None

    @override
    def close(self) -> None:
        self._env.close()

    @override
    def get_state(self) -> Json:
        """Return the seed and the turns: `set_state` takes them again."""
        return super().get_state() | {"seed": self._seed, "turns": list(self._turns)}

    @override
    def set_state(self, state: Json) -> None:
        """Start the episode again, and take its turns."""
        self._start(state["seed"])
        for turn in state["turns"]:
            self.step(Message("assistant", turn))
        super().set_state(state)


def _make(id: str, kwargs: Json, max_steps: int | None) -> AnyEnv:
    key = f"env.options.id={id}"
    if is_reference(id) and not _VERSIONED.search(id):
        with calling(f"{key} with env.options.kwargs={kwargs}"):
            env = load_object(id, "env.options.id")(**kwargs)
        if not isinstance(env, gymnasium.Env):
            raise ConfigError(f"{key} returned {env!r:.100}, and no gymnasium.Env")
        return env if max_steps is None else gymnasium.wrappers.TimeLimit(env, max_steps)
    if ":" in id:
        module, _, id = id.rpartition(":")
        load_module(module, key)
    if id not in gymnasium.registry:
        raise unknown_name("environment of Gymnasium", id, _similar_ids(id), "env.options.id")
    with calling(f"{key} with env.options.kwargs={kwargs}"):
        return gymnasium.make(id, max_episode_steps=max_steps, disable_env_checker=True, **kwargs)


def _similar_ids(id: str) -> list[str]:
    return get_close_matches(id, gymnasium.registry, n=5, cutoff=0.4)
