from contextlib import nullcontext

import pytest

from agentrl.config.rollout import FailureConfig
from agentrl.core.errors import RunStopped
from agentrl.core.types import Failure, FailureKind, Rollout, StopReason
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits


@pytest.mark.parametrize(("prompt", "room"), [(10, 20), (80, 20), (90, 10), (100, 0), (101, -1)])
def test_room(prompt, room):
    assert Limits(max_turns=1, max_tokens=100, max_seconds=1, max_new_tokens=20).room(prompt) == room


@pytest.mark.parametrize("name", ["max_turns", "max_tokens", "max_seconds", "max_new_tokens"])
def test_limits_that_allow_nothing_are_refused(name):
    limits = {"max_turns": 1, "max_tokens": 1, "max_seconds": 1.0, "max_new_tokens": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0"):
        Limits(**limits)


KINDS = [kind for kind in FailureKind if kind is not FailureKind.REWARD]
"""Those that end an episode; what follows a reward that fails is ``reward.on_error``'s to say."""


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_failure_has_a_key(kind):
    policy = FailurePolicy(FailureConfig(**{kind.value: "stop"}))
    for other in KINDS:
        action = policy.decide(Failure(other, "E", "m"), 0)
        assert (action == "stop") == (other is kind)


def test_retries_end_in_dropping():
    policy = FailurePolicy(FailureConfig(tool="retry", max_retries=2))
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    assert [policy.decide(failure, attempt) for attempt in range(4)] == ["retry", "retry", "drop", "drop"]


@pytest.mark.parametrize(("share", "dropped", "stops"), [(0.5, 2, False), (0.5, 3, True), (0, 1, True), (1, 4, False)])
def test_too_many(share, dropped, stops):
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    rollouts = [
        Rollout("t", str(number), [], 0.0, StopReason.FAILED, failure=failure, dropped=number < dropped)
        for number in range(4)
    ]
    with pytest.raises(RunStopped, match="ToolFailure: gone") if stops else nullcontext():
        FailurePolicy(FailureConfig(max_failed_share=share)).check_dropped(rollouts)
