"""An episode is the same bit for bit in every dialect, as a loop and as an environment, on the embedded engine.

Log-probabilities depend on what is computed at once, so it has one slot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from engine_dialects import EngineEpisodes, PlayOn, long_proof
from talking_policy import CONTEXT, save_talking_policy

from agentrl.config.sampler import EmbeddedConfig
from agentrl.inference.launch.processes import launch_embedded


@contextmanager
def talking_engine(folder: Path, **training: int) -> Iterator[PlayOn]:
    model = save_talking_policy(folder / "model", **training)
    engine = launch_embedded(model, EmbeddedConfig(slots=1, context=CONTEXT, threads=1), log=folder / "engine.log")
    try:
        yield partial(EngineEpisodes, model, engine.url)
    finally:
        engine.stop()


@pytest.mark.long
def test_an_episode_is_the_same_bit_for_bit_on_the_embedded_engine(tmp_path: Path) -> None:
    """Streamed, with a policy that has learned to talk, and no more. That whole replies are the same, scripted episodes show."""
    with talking_engine(tmp_path, steps=80, rows=4) as play_on:
        episodes = play_on(temperature=1.0, max_new_tokens=24)
        episodes.check(2, seed=0, streams=(True,))
        assert episodes.counts["turns"] >= 3
        assert episodes.counts["calls"], "it says more than text"


@long_proof
def test_300_episodes_are_the_same_bit_for_bit_on_the_embedded_engine(tmp_path: Path) -> None:
    with talking_engine(tmp_path) as play_on:
        play_on(temperature=1.0).prove(seed=0)
