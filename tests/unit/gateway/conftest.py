from functools import partial

import pytest
from gateway_episodes import Play, make_test_renderer, play_with

from agentrl.render.renderer import ChatRenderer


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return make_test_renderer()


@pytest.fixture
def play(renderer: ChatRenderer) -> Play:
    """Play an episode of a script; see `play_with`."""
    return partial(play_with, renderer)
