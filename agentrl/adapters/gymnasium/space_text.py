"""Values of Gymnasium's spaces as texts, texts as actions, and the sentence that explains how to write one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from agentrl.adapters.base import ActionError, read_json, tagged_answer, to_json
from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, load_image

AnySpace = spaces.Space[Any]
Numbers = int | NDArray[Any]
MOST_NUMBERS = 1024
"""Numbers of an observation that is shown as a text."""
_HIGHLIGHTED = re.compile(r"\x1b\[4\dm(.*?)\x1b\[0m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def check_observations(space: AnySpace, name: str = "") -> None:
    """Check that the observations of a space have a text.

    Raises:
        ConfigError: they have too many numbers, or the space has no rule.
    """
    about = f"the observations{f' {name!r}' if name else ''} of env.options.id"
    hint = "set env.options.observation to a function that returns their text, as file.py:function"
    if isinstance(space, spaces.Dict):
        for key, member in space.spaces.items():
            check_observations(member, f"{name}.{key}" if name else str(key))
    elif isinstance(space, spaces.Tuple):
        for index, member in enumerate(space.spaces):
            check_observations(member, f"{name}[{index}]")
    elif isinstance(space, spaces.Sequence):
        check_observations(space.feature_space, f"{name}[]")
    elif isinstance(space, spaces.Box | spaces.MultiBinary | spaces.MultiDiscrete):
        if (numbers := math.prod(space.shape or ())) > MOST_NUMBERS:
            raise ConfigError(
                f"{about} have the shape {space.shape}, {numbers} numbers, more than {MOST_NUMBERS} for a text; {hint}"
            )
    elif not isinstance(space, spaces.Discrete | spaces.Text):
        raise ConfigError(f"{about} are of the space {space!r:.200}, which has no text; {hint}")


def has_text(space: AnySpace) -> bool:
    """Return whether the observations of a space have a text; see `check_observations`."""
    try:
        check_observations(space)
    except ConfigError:
        return False
    return True


def rendered_image(frame: object) -> Image:
    """Return what ``render`` of the mode ``rgb_array`` returned as an image.

    Raises:
        ConfigError: it is no array of colours.
    """
    if not (isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3):
        shown = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise ConfigError(
            f"env.options.images=true: render of the mode rgb_array returned {shown}, and no array of uint8 in the shape "
            "(height, width, 3); leave the option out"
        )
    from PIL import Image as pil

    return load_image(pil.fromarray(frame))


def rendered_text(frame: object) -> str:
    """Return what ``render`` of the mode ``ansi`` returned: what it highlights by colour is in brackets.

    Raises:
        ConfigError: it is no text.
    """
    text = frame.getvalue() if hasattr(frame, "getvalue") else frame
    if not isinstance(text, str):
        raise ConfigError(
            f"env.options.observation=ansi: render returned a {type(frame).__name__}, and no text; leave the option out"
        )
    return _ESCAPE.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip("\n")


class ActionText:
    """Texts as actions of a space.

    Args:
        space: of the actions.
        names: of the actions of a `Discrete` space, in order; empty: numbers only.

    Raises:
        ConfigError: the space has no rule, or ``names`` do not fit it.
    """

    def __init__(self, space: AnySpace, names: Sequence[str] = ()) -> None:
        if names and (not isinstance(space, spaces.Discrete) or len(names) != space.n):
            count = (
                f"{space.n} actions" if isinstance(space, spaces.Discrete) else f"actions of the space {space!r:.100}"
            )
            raise ConfigError(
                f"env.options.actions has {len(names)} names, and env.options.id has {count}; name each action, or none"
            )
        folded = [name.casefold() for name in names]
        if len(set(folded)) < len(folded):
            raise ConfigError(f"env.options.actions={list(names)} has a name twice")
        self._space = space
        self._names = list(names)
        self.rule = (
            "Answer with the text of your action alone."
            if isinstance(space, spaces.Text)
            else f"End your answer with <action>…</action> around {self._describe(space)}."
        )
        """The sentence that explains how to write an action."""

    def parse(self, text: str) -> object:
        """Return the action of a turn's text.

        Of a `Text` space it is the whole text; otherwise what the last ``<action>…</action>`` holds, or without one the text.

        Raises:
            ActionError: it is none.
        """
        if isinstance(self._space, spaces.Text):
            if not self._space.contains(text):
                raise ActionError(_text_fault(self._space, text))
            return text
        answer = tagged_answer(text)
        if isinstance(self._space, spaces.Discrete):
            return self._discrete(answer)
        return _value(self._space, read_json(answer), "the action")

    def _discrete(self, answer: str) -> object:
        for index, name in enumerate(self._names):
            if name.casefold() == answer.casefold():
                return self._number(index)
        assert isinstance(self._space, spaces.Discrete)
        if not re.fullmatch(r"[+-]?\d{1,18}", answer, re.ASCII):
            raise ActionError(f"{answer!r:.100} is no action")
        return _value(self._space, int(answer), "the action")

    def _number(self, index: int) -> object:
        assert isinstance(self._space, spaces.Discrete)
        return self._space.dtype.type(self._space.start + index)

    def _describe(self, space: AnySpace) -> str:
        if isinstance(space, spaces.Discrete):
            first, last = int(space.start), int(space.start + space.n - 1)
            if space is self._space and self._names:
                return f"one of {', '.join(self._names)}"
            return f"a whole number from {first} to {last}"
        if isinstance(space, spaces.MultiBinary):
            return f"a JSON array of zeros and ones, of the shape {list(space.shape)}"
        if isinstance(space, spaces.MultiDiscrete):
            low, high = space.start.tolist(), (space.start + space.nvec - 1).tolist()
            return f"a JSON array of whole numbers, each from its number in {low} to its number in {high}"
        if isinstance(space, spaces.Box):
            low, high = space.low, space.high
            limits = f"from {low.min():g} to {high.max():g}"
            if low.min() != low.max() or high.min() != high.max():
                limits = f"each from its number in {to_json(low, 6)} to its number in {to_json(high, 6)}"
            return (
                f"a JSON array of numbers {limits}, of the shape {list(space.shape)}"
                if space.shape
                else f"a number {limits}"
            )
        if isinstance(space, spaces.Text):
            return f"a JSON string of {space.min_length} to {space.max_length} characters"
        if isinstance(space, spaces.Dict):
            members = "; ".join(f"{key!r}: {self._describe(member)}" for key, member in space.spaces.items())
            return f"a JSON object with {members}"
        if isinstance(space, spaces.Tuple):
            return f"a JSON array of: {'; '.join(map(self._describe, space.spaces))}"
        raise ConfigError(
            f"env.options.id has actions of the space {space!r:.200}, for which texts have no rule; set env.options.action to a "
            "function that returns the action of a text, as file.py:function"
        )


def _text_fault(space: spaces.Text, text: str) -> str:
    if not space.min_length <= len(text) <= space.max_length:
        return f"it has {len(text)} characters, and must have {space.min_length} to {space.max_length}"
    unknown = sorted(set(text) - set(space.character_set))
    return f"it has the characters {''.join(unknown)!r:.60}, which are not allowed"


def _value(space: AnySpace, value: object, name: str) -> object:
    """Return a value of JSON as one of a space.

    Raises:
        ActionError: it is none.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(value, dict) or set(value) != set(space.spaces):
            raise ActionError(f"{name} must be an object with exactly the keys {', '.join(map(str, space.spaces))}")
        return {key: _value(member, value[key], f"{name}[{key!r}]") for key, member in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(value, list) or len(value) != len(space.spaces):
            raise ActionError(f"{name} must be an array of {len(space.spaces)} values")
        return tuple(
            _value(member, item, f"{name}[{index}]")
            for index, (member, item) in enumerate(zip(space.spaces, value, strict=True))
        )
    if isinstance(space, spaces.Text):
        if not isinstance(value, str):
            raise ActionError(f"{name} must be a string, and is {value!r:.60}")
        if not space.contains(value):
            raise ActionError(f"{name}: {_text_fault(space, value)}")
        return value
    return _numbers(space, value, name)


def _numbers(space: AnySpace, value: object, name: str) -> object:
    shape = list(space.shape or ())
    try:
        numbers = np.array(value, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ActionError(f"{name} is {value!r:.60}, and must hold numbers alone, in the shape {shape}") from None
    if shape == [1]:
        numbers = numbers.reshape(-1)  # a number is as good as an array of it
    if list(numbers.shape) != shape or _holds_others(value):
        wish = f"numbers in the shape {shape}" if shape else "a number"
        raise ActionError(f"{name} is {value!r:.60}, and must be {wish}")
    is_whole = not isinstance(space, spaces.Box) or np.issubdtype(np.dtype(space.dtype), np.integer)
    if is_whole and not np.array_equal(numbers, np.round(numbers)):
        raise ActionError(f"{name} is {value!r:.60}, and must hold whole numbers")
    low, high = _limits(space)
    if np.any(numbers < low) or np.any(numbers > high) or np.any(np.isnan(numbers)):
        raise ActionError(f"{name} is {value!r:.60}, which is outside of {to_json(low, 6)} to {to_json(high, 6)}")
    dtype = np.dtype(space.dtype)
    return dtype.type(numbers) if not shape and isinstance(space, spaces.Discrete) else numbers.astype(dtype)


def _holds_others(value: object) -> bool:
    """Return whether a value of JSON holds anything but numbers, which NumPy would take for some."""
    if isinstance(value, list):
        return any(map(_holds_others, value))
    return isinstance(value, bool) or not isinstance(value, int | float)


def _limits(space: AnySpace) -> tuple[Numbers, Numbers]:
    if isinstance(space, spaces.Discrete):
        return int(space.start), int(space.start + space.n - 1)
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    if isinstance(space, spaces.MultiBinary):
        return 0, 1
    assert isinstance(space, spaces.Box)
    return space.low, space.high
