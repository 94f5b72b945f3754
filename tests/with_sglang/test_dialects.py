"""An episode is the same bit for bit in every dialect, as a loop and as an environment, on SGLang.

Log-probabilities depend on what is computed at once: requests run one at a time, and without what earlier ones left in the
prefix cache. Sampling is greedy: SGLang on a CPU has no seeds.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_dialects import EngineEpisodes, PlayOn, long_proof
from talking_policy import save_talking_policy

from agentrl.inference.launch.processes import launch_sglang

pytestmark = pytest.mark.sglang

ALONE = {"device": "cpu", "max_running_requests": 1, "disable_radix_cache": True}


@pytest.fixture(scope="module")
def play_on(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayOn]:
    folder = tmp_path_factory.mktemp("policy")
    model = save_talking_policy(folder / "model")
    engine = launch_sglang(model, log=folder / "engine.log", options=ALONE, python=sglang_python, timeout_s=1200)
    yield partial(EngineEpisodes, model, engine.url)
    engine.stop()


def test_an_episode_is_the_same_bit_for_bit_on_sglang(play_on: PlayOn) -> None:
    play_on(temperature=0.0).check(6, seed=0)


@long_proof
def test_300_episodes_are_the_same_bit_for_bit_on_sglang(play_on: PlayOn) -> None:
    play_on(temperature=0.0).prove(seed=0)
