"""An episode is the same bit for bit in every dialect, as a loop and as an environment, on the embedded engine."""

from collections.abc import Iterator

import pytest
from engine_dialects import check_engine
from gateway_episodes import make_test_renderer
from talking_policy import CONTEXT, save_talking_policy

from agentrl.config.sampler import EmbeddedConfig
from agentrl.inference.launch.processes import launch_embedded

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("policy")
    config = EmbeddedConfig(slots=8, context=CONTEXT, threads=1)
    engine = launch_embedded(save_talking_policy(folder / "model"), config, log=folder / "engine.log")
    yield engine.url
    engine.stop()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_episode_is_the_same_bit_for_bit_with_an_engine(url: str, temperature: float) -> None:
    played = check_engine(make_test_renderer(), url, temperature)
    if temperature:
        actions = [turn.action for episode in played for turn in episode.rollout.turns]
        for kind in ("<think>", "<tool_call>"):
            assert any(kind in action for action in actions), kind
