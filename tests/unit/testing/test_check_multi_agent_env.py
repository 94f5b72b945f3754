"""Each rule of `check_multi_agent_env` finds an environment that breaks it."""

import random

import pytest

from agentrl import Message, MultiAgentEnv
from agentrl.core.multi_agent_env import view_fault
from agentrl.testing import ContractError, check_multi_agent_env


class Echo(MultiAgentEnv):
    """Two agents say something twice, at the same time."""

    possible_agents = ["a", "b"]  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.turns = 0
        return super().reset(seed, options)

    def step(self, actions):
        self.turns += 1
        agents, over = list(self.agents), self.turns == 2
        views = {agent: {"messages": (Message("user", actions[agent].content),)} for agent in agents}
        if over:
            self.agents, self.acting = [], ()
        return (views, {agent: self.reward() for agent in agents}, dict.fromkeys(agents, over),
                dict.fromkeys(agents, False), {agent: {} for agent in agents})  # fmt: skip

    def reward(self):
        return 1.0

    def get_state(self):
        return super().get_state() | {"turns": self.turns}

    def set_state(self, state):
        super().set_state(state)
        self.turns = state["turns"]


class NoStep(MultiAgentEnv):
    possible_agents = ["a"]  # noqa: RUF012


class Forgets(Echo):
    def set_state(self, state):
        super().set_state(state)
        self.turns = 0


class DrawsGlobally(Echo):
    def reward(self):
        return random.random()


class NotFinite(Echo):
    def reward(self):
        return float("nan")


class TooLarge(Echo):
    def reward(self):
        return 10**400


class BareText(Echo):
    def step(self, actions):
        _, *other_actions = super().step(actions)
        return ({"a": {"text": "hi"}, "b": {"messages": ()}}, *other_actions)


class Revives(Echo):
    def step(self, actions):
        returned = super().step(actions)
        self.agents = ["a", "b"]
        return returned


class NobodyActs(Echo):
    def step(self, actions):
        returned = super().step(actions)
        self.acting = ()
        return returned


def test_a_correct_environment_passes():
    check_multi_agent_env(Echo)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (NoStep, r"defines no step\(actions\)"),
        (Forgets, "set_state does not bring back"),
        (DrawsGlobally, "does not replay"),
        (NotFinite, "finite float"),
        (TooLarge, "finite float"),
        (BareText, r'must be \{"messages"'),
        (Revives, "no agent to act|until it is terminated"),
        (NobodyActs, "left no agent to act"),
    ],
)
def test_a_broken_rule_is_found(env, message):
    state = random.getstate()
    with pytest.raises(ContractError, match=message):
        check_multi_agent_env(env)
    random.setstate(state)


def test_a_view_holds_messages():
    assert view_fault({"messages": (Message("user", "x"),)}) == ""
    assert "must be a tuple" in view_fault({"messages": ["x"]})
