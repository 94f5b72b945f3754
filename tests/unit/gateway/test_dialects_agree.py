"""The same episode through every dialect, streaming or not, a loop of agentrl, and an environment gives the same rollout.

The policy is a function of the prompt's ids; `tests/integration/test_engine_dialects.py` and `tests/with_sglang` have engines.
"""

from functools import partial

from dialect_episodes import LIMITS, STEPS, TEXTS, Step, check_dialects, check_environment, speak
from gateway_episodes import play_with
from hypothesis import given
from hypothesis import strategies as st

from agentrl.render.renderer import ChatRenderer


@given(steps=STEPS)
def test_an_episode_is_the_same_bit_for_bit_in_every_dialect(renderer: ChatRenderer, steps: list[Step]) -> None:
    check_dialects(partial(play_with, renderer, speak, **LIMITS), steps)


@given(steps=st.lists(st.tuples(st.sampled_from(["continue", "continue", "compact"]), st.just(0), TEXTS), max_size=6))
def test_an_environment_is_the_same_bit_for_bit(renderer: ChatRenderer, steps: list[Step]) -> None:
    check_environment(partial(play_with, renderer, speak, **LIMITS), steps)
