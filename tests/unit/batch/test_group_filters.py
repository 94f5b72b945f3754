"""Filters on groups: which drop a group, and their messages."""

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.batch.groups import GroupFilters
from agentrl.config.rollout import FilterGroupsConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout, StopReason


def group(*rewards: float, stop: StopReason = StopReason.TERMINATED, dropped: int = 0) -> list[Rollout]:
    """A group with these rewards; the failure policy dropped the last ``dropped`` rollouts."""
    rollouts = [Rollout("t1", str(number), [], reward, stop) for number, reward in enumerate(rewards)]
    for rollout in rollouts[len(rollouts) - dropped :]:
        rollout.dropped = True
    return rollouts


def reason(rollouts: list[Rollout], *names: str, solved: float = 1.0) -> str:
    return GroupFilters(FilterGroupsConfig(filters=list(names), solved_reward=solved)).reason(rollouts)


@pytest.mark.parametrize(
    ("name", "dropped", "trained"),
    [
        ("zero_variance", group(0.5, 0.5), group(0.5, 0.6)),
        ("zero_variance", group(1, 1, 0, dropped=1), group(1, 0, 0, dropped=1)),
        ("all_solved", group(1, 1.5), group(1, 0.9)),
        ("none_solved", group(0.9, 0), group(1, 0)),
        ("too_long", group(0, 1, stop=StopReason.MAX_TOKENS), group(0, 1) + group(1, stop=StopReason.MAX_TURNS)),
        ("incomplete", group(1, 0, 1, dropped=1), group(1, 0, 1)),
    ],
)
def test_each_filter(name: str, dropped: list[Rollout], trained: list[Rollout]) -> None:
    assert reason(dropped, name) == name
    assert reason(trained, name) == ""
    assert reason(dropped) == "", "without filters all groups are trained"


def test_the_first_filter_is_the_reason() -> None:
    assert reason(group(1, 1), "none_solved", "all_solved", "zero_variance") == "all_solved"
    assert reason(group(0.4, 0.2), "all_solved", "none_solved", solved=0.5) == "none_solved"
    assert reason(group(0.4, 0.6), "all_solved", "none_solved", solved=0.5) == ""


def test_a_group_that_failed_as_a_whole_is_replaced_if_there_are_filters() -> None:
    assert reason(group(0, 0, dropped=2), "all_solved") == "failed"
    assert reason(group(0, 0, dropped=2)) == ""


@pytest.fixture
def custom(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        (tmp_path / "mine.py").write_text(f"def easy(group):\n    {body}\n")
        return f"{tmp_path / 'mine.py'}:easy"

    return write


def test_a_filter_of_the_user(custom: Callable[[str], str]) -> None:
    name = custom("return sum(one.reward for one in group) > 1")
    assert reason(group(1, 1), name) == name
    assert reason(group(1, 0), name) == ""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return group[9]", r"easy raised IndexError: .*mine\.py:2.* on the group of task 't1'"),
        ("return 1", r"easy must return True \(drop the group\) or False, it returned 1"),
    ],
)
def test_a_filter_of_the_user_that_fails(custom: Callable[[str], str], body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.filter_groups\.filters: .*{message}"):
        reason(group(1, 0), custom(body))


def test_an_unknown_filter() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filter_groups\.filters.*'zero'.*zero_variance, all_solved"):
        GroupFilters(FilterGroupsConfig(filters=["zero"]))
