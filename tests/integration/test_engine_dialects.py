"""An episode is the same bit for bit in every dialect, as a loop and as an environment, on the embedded engine.

Log-probabilities depend on what is computed at once, so it has one slot.
"""

from collections.abc import Iterator
from functools import partial

import pytest
from engine_dialects import EngineEpisodes, PlayOn, long_proof
from talking_policy import CONTEXT, save_talking_policy

from agentrl.config.sampler import EmbeddedConfig
from agentrl.inference.launch.processes import launch_embedded


@pytest.fixture(scope="module")
def play_on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayOn]:
    folder = tmp_path_factory.mktemp("policy")
    model = save_talking_policy(folder / "model")
    engine = launch_embedded(model, EmbeddedConfig(slots=1, context=CONTEXT, threads=1), log=folder / "engine.log")
    yield partial(EngineEpisodes, model, engine.url)
    engine.stop()


def test_an_episode_is_the_same_bit_for_bit_on_the_embedded_engine(play_on: PlayOn) -> None:
    play_on(temperature=1.0).check(2, seed=0)


@long_proof
def test_300_episodes_are_the_same_bit_for_bit_on_the_embedded_engine(play_on: PlayOn) -> None:
    play_on(temperature=1.0).prove(seed=0)
