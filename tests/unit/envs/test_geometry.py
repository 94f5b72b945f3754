"""What the policy sees of a picture, what it may ask for, and what its answer earns."""

from typing import Any

import numpy as np
import pytest
from agentrl_envs.geometry import GeometryEnv
from agentrl_envs.geometry.env import NO_ZOOMS
from agentrl_envs.geometry.picture import LEAST_SIDE, MOST_RATIO, box_fault, crop_picture
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as pil

from agentrl.core.errors import ConfigError, TaskError
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.task import Task
from agentrl.core.types import CallStatus, Message, ToolCall

PIXELS = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)
"""Wherever a part is cut by a pixel too far, it shows."""
PICTURE = load_image(pil.fromarray(PIXELS))
TASK = Task("t", (Message("user", f"{IMAGE_MARK}Which cell?", images=(PICTURE,)),), answer="B3")
EIGHTHS = st.integers(0, 7).flatmap(lambda start: st.tuples(st.just(start), st.integers(start + 1, 8)))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def begin(task: Task = TASK, **options: Any) -> GeometryEnv:
    env = GeometryEnv(**{"view_px": 32, **options})
    env.reset(seed=0, options={"task": task})
    return env


def zoom(*boxes: Any, name: str = "zoom") -> Message:
    calls = tuple(ToolCall(f"c{number}", name, {"box": box}) for number, box in enumerate(boxes))
    return Message("assistant", "", tool_calls=calls)


def answers(env: GeometryEnv, message: Message) -> tuple[Message, ...]:
    observation, reward, terminated, truncated, _ = env.step(message)
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert isinstance(observation, tuple)
    return observation


def pixels_of(message: Message) -> np.ndarray:
    [image] = message.images
    return np.asarray(image.to_pil())


def test_the_prompt_has_the_picture_small_and_the_question() -> None:
    env = GeometryEnv(view_px=32, prompt="Look: {picture}\n{question}\nAnswer.")
    [message], _ = env.reset(seed=0, options={"task": TASK})
    assert isinstance(message, Message)
    assert message.content == f"Look: {IMAGE_MARK}\nWhich cell?\nAnswer."
    means = PIXELS.reshape(32, 8, 32, 8, 3).mean((1, 3))
    assert np.abs(pixels_of(message) - means).max() <= 1


def test_a_question_may_contain_the_names_of_the_prompt() -> None:
    task = Task("t", (Message("user", f"{IMAGE_MARK}What is {{picture}}?", images=(PICTURE,)),), answer="no")
    [message], _ = GeometryEnv(view_px=32).reset(seed=0, options={"task": task})
    assert isinstance(message, Message)
    assert "What is {picture}?" in message.content


DECODED = PICTURE.to_pil()


@settings(max_examples=40, deadline=None)
@given(EIGHTHS, EIGHTHS)
def test_crops_are_exact(columns: tuple[int, int], rows: tuple[int, int]) -> None:
    """The oracle repeats pixels, or takes means of equal blocks."""
    box = [125 * edge for edge in (columns[0], rows[0], columns[1], rows[1])]
    part = PIXELS[32 * rows[0] : 32 * rows[1], 32 * columns[0] : 32 * columns[1]]
    longest = max(part.shape[:2])
    same = np.asarray(crop_picture(DECODED, box, longest))
    np.testing.assert_array_equal(same, part)
    larger = np.asarray(crop_picture(DECODED, box, 3 * longest))
    np.testing.assert_array_equal(larger, part.repeat(3, 0).repeat(3, 1))
    smaller = np.asarray(crop_picture(DECODED, box, longest // 4))
    means = part.reshape(part.shape[0] // 4, 4, part.shape[1] // 4, 4, 3).mean((1, 3))
    assert np.abs(smaller - means).max() <= 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 1000), min_size=4, max_size=4),
    st.integers(8, 100),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_what_has_no_fault_is_shown_within_its_size(box: list[int], view_px: int, width: int, height: int) -> None:
    if box_fault(box):
        return
    shown = crop_picture(pil.new("RGB", (width, height)), box, view_px)
    assert max(shown.size) == view_px
    assert min(shown.size) >= 1


def test_calls_are_answered_in_their_order_with_what_they_asked_for() -> None:
    env = begin()
    upper_left, lower_right = answers(env, zoom([0, 0, 125, 125], [875, 875, 1000, 1000]))
    assert (upper_left.role, upper_left.content, upper_left.tool_call_id) == ("tool", IMAGE_MARK, "c0")
    np.testing.assert_array_equal(pixels_of(upper_left), PIXELS[:32, :32])
    np.testing.assert_array_equal(pixels_of(lower_right), PIXELS[-32:, -32:])


@pytest.mark.parametrize(
    "box",
    [
        [500, 0, 0, 500],
        [0, 0, 0, 0],
        [0, 0, 1000, LEAST_SIDE - 1],
        [0, 0, 1000, 1000 // MOST_RATIO - 1],
        [0, 0, 1001, 1000],
        [-1, 0, 500, 500],
        [0, 0, 500],
        [0, 0, 500, 500, 500],
        [0, 0, 500.5, 500],
        [False, False, True, True],
        [0, 0, 10**400, 500],
        [0, 0, float("nan"), float("inf")],
        "0, 0, 500, 500",
        {"left": 0},
        None,
    ],
)
def test_boxes_that_are_none_are_refused_with_a_reason(box: Any) -> None:
    env = begin()
    [answer] = answers(env, zoom(box))
    assert not answer.images
    assert "box" in answer.content
    *_, info = env.step(Message("assistant", "B3"))
    assert info["metrics"] == {"exact_match": 1.0, "zooms": 0.0, "refused_zooms": 1.0}


PATIENT = begin(max_zooms=10**6)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["box", "x"]), JSON, max_size=2) | st.fixed_dictionaries({"box": st.lists(JSON)})
)
def test_no_arguments_break_an_episode(arguments: dict[str, Any]) -> None:
    [answer] = answers(PATIENT, Message("assistant", "", tool_calls=(ToolCall("c", "zoom", arguments),)))
    assert answer.role == "tool"
    assert bool(answer.images) == (answer.content == IMAGE_MARK)


def test_other_tools_and_calls_that_do_not_parse_are_refused() -> None:
    env = begin()
    assert "no tool 'python'" in answers(env, zoom([0, 0, 500, 500], name="python"))[0].content
    broken = ToolCall("c", "zoom", {}, status=CallStatus.INVALID_JSON, fault="no JSON")
    assert answers(env, Message("assistant", "", tool_calls=(broken,)))[0].content == "no JSON"


def test_zooms_end_at_their_limit_and_the_answer_still_counts() -> None:
    env = begin(max_zooms=1)
    first, second = answers(env, zoom([0, 0, 500, 500], [0, 0, 500, 500]))
    assert first.images
    assert (second.content, second.images) == (NO_ZOOMS, ())
    _, reward, terminated, _, _ = env.step(Message("assistant", "B3"))
    assert (reward, terminated) == (1.0, True)
    without = begin(max_zooms=0)
    assert without.tools == ()
    assert "no tool" in answers(without, zoom([0, 0, 500, 500]))[0].content


@pytest.mark.parametrize(
    ("answer", "reward"), [("B3", 1), (" b3.\n", 1), ("B", 0), ("B33", 0), ("in B3", 0), ("", 0), ("B2", 0)]
)
def test_only_the_whole_answer_is_right(answer: str, reward: float) -> None:
    assert begin().step(Message("assistant", answer))[1] == reward


def test_tasks_without_a_picture_are_refused() -> None:
    for task, reason in [
        (Task("t", (Message("user", "Which?"),), answer="B3"), "0 images"),
        (Task("t", TASK.prompt, answer=["B3"]), "answer"),
        (Task("t", (Message("user", IMAGE_MARK, images=(load_image(PICTURE.data[:200]),)),), answer="B3"), "decoded"),
    ]:
        with pytest.raises(TaskError, match=reason):
            begin(task)


@pytest.mark.parametrize(
    "options", [{"view_px": 7}, {"max_zooms": -1}, {"prompt": "{question}"}, {"prompt": "{picture}{picture}{question}"}]
)
def test_options_out_of_range_are_refused_by_key(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"env.options.{next(iter(options))}"):
        GeometryEnv(**options)


def test_an_episode_goes_on_from_its_state() -> None:
    env = begin(max_zooms=1)
    answers(env, zoom([0, 0, 500, 500]))
    resumed = begin(max_zooms=1)
    resumed.set_state(env.get_state())
    assert answers(resumed, zoom([0, 0, 500, 500]))[0].content == NO_ZOOMS
