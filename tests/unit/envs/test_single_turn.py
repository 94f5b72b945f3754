"""One prompt, one answer."""

from agentrl_envs.single_turn import SingleTurnEnv

from agentrl import Message, Task
from agentrl.testing import check_env


def test_contract() -> None:
    check_env(SingleTurnEnv)


def test_the_first_turn_is_the_last_and_earns_nothing_here() -> None:
    env = SingleTurnEnv()
    prompt = (Message("system", "Be brief."), Message("user", "2 + 2?"))
    observation, info = env.reset(seed=1, options={"task": Task("t", prompt, answer="4")})
    assert (observation, info) == (prompt, {})
    assert env.step(Message("assistant", "4")) == ((), 0.0, True, False, {})
    assert SingleTurnEnv.needs_reward
