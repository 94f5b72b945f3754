"""An episode is the same bit for bit in every dialect, as a loop and as an environment, on SGLang.

Log-probabilities depend on what is computed at once: requests run one at a time, and without what earlier ones left in the
prefix cache. Sampling is greedy: SGLang on a CPU has no seeds.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_dialects import check_engine
from gateway_episodes import make_test_renderer
from talking_policy import save_talking_policy

from agentrl.inference.launch.processes import launch_sglang

pytestmark = pytest.mark.sglang

ALONE = {"device": "cpu", "max_running_requests": 1, "disable_radix_cache": True}


@pytest.fixture(scope="module")
def url(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("policy")
    model = save_talking_policy(folder / "model")
    engine = launch_sglang(model, log=folder / "engine.log", options=ALONE, python=sglang_python, timeout_s=300)
    yield engine.url
    engine.stop()


def test_an_episode_is_the_same_bit_for_bit_on_sglang(url: str) -> None:
    check_engine(make_test_renderer(), url, temperature=0.0)
