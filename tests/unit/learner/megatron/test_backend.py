from __future__ import annotations

from typing import Any

import pytest

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError
from agentrl.learner.registry import make_backend
from tests.algo_config import make_algo


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"lora": {}}, "learner.lora"),
        ({"fp8": True}, "learner.fp8"),
        ({"optimizer": {"name": "muon"}}, "learner.optimizer.name=muon"),
        ({"reshard_after_forward": True}, "learner.reshard_after_forward"),
        ({"cpu_offload": "optimizer"}, "learner.cpu_offload"),
        ({"ranks": 2, "context_parallel": 2}, "learner.context_parallel"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_its_key(given: dict[str, Any], key: str) -> None:
    backend = make_backend(LearnerConfig.model_validate({"backend": "megatron", **given}))
    with pytest.raises(ConfigError, match=rf"^{key}.*megatron lacks it"):
        backend.check(make_algo(), [])


def test_a_critic_with_another_optimizer_is_refused() -> None:
    backend = make_backend(LearnerConfig(backend="megatron"))
    backend.check(make_algo(advantage={"name": "gae"}), [])
    with pytest.raises(ConfigError, match=r"^algo\.critic\.optimizer\.name=muon: .*megatron lacks it"):
        backend.check(make_algo(advantage={"name": "gae"}, critic={"optimizer": {"name": "muon"}}), [])


def test_layers_are_recomputed_by_one_key_only() -> None:
    given = {"backend": "megatron", "recompute": "full", "megatron": {"recompute_granularity": "full"}}
    with pytest.raises(ConfigError, match=r"^learner\.recompute=full with learner\.megatron\.recompute_granularity"):
        make_backend(LearnerConfig.model_validate(given)).check(make_algo(), [])
