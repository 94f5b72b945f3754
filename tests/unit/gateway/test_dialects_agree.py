"""The same episode through every dialect, streaming or not, a loop of agentrl, and an environment gives the same rollout.

The policy is a function of the prompt's ids; `tests/long/test_dialects_agree.py` and `tests/with_sglang` have engines.
"""

from functools import partial
from typing import Any

from dialect_episodes import LIMITS, STEPS, TEXTS, Step, TalkEnv, as_loop, check_dialects, plain, speak
from gateway_episodes import Played, play_with
from hypothesis import given
from hypothesis import strategies as st

from agentrl.render.renderer import ChatRenderer


@given(steps=STEPS)
def test_an_episode_is_the_same_bit_for_bit_in_every_dialect(renderer: ChatRenderer, steps: list[Step]) -> None:
    check_dialects(partial(play_with, renderer, speak, **LIMITS), steps)


@given(steps=st.lists(st.tuples(st.sampled_from(["continue", "continue", "compact"]), st.just(0), TEXTS), max_size=6))
def test_an_environment_is_the_same_bit_for_bit(renderer: ChatRenderer, steps: list[Step]) -> None:
    """But for the names of a compaction: in an environment the conversation goes on, at the gateway there is another."""
    play = partial(play_with, renderer, speak, **LIMITS)
    expected = play(as_loop(steps), is_loop=True)
    played = play(None, env=partial(TalkEnv, steps))
    assert played.rollout.failure is None, played.rollout.failure
    if "compact" in {how for how, _, _ in steps}:
        assert tokens(played) == tokens(expected)
    else:
        assert plain(played.rollout) == plain(expected.rollout)
        assert played.sampler.requests == expected.sampler.requests


def tokens(played: Played) -> Any:
    """Return what is trained."""
    rows = [(row.token_ids.tolist(), row.mask.tolist(), row.logprobs.tobytes()) for row in played.rollout.rows]
    return rows, played.rollout.reward, [turn.action for turn in played.rollout.turns]
