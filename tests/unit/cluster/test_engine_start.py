"""Start of an engine by an actor that Ray does not start."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError

from agentrl.cluster import engine_actors
from agentrl.cluster.engine_actors import RayLauncher
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import EngineError, LearnerError


class Launcher(RayLauncher):
    """Waits for the answer of an actor."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def _launch(self, number: int) -> Any:
        return engine_actors.wait_result("answer", self.timeout_s)


def test_it_ends_with_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[None] = []

    def check_ray() -> None:
        looks.append(None)
        if len(looks) == 3:
            raise LearnerError("Ray's process raylet has ended")

    monkeypatch.setattr(engine_actors, "ray", SimpleNamespace(wait=lambda waited, timeout: ([], waited)))
    monkeypatch.setattr(engine_actors, "check_ray", check_ray)
    with pytest.raises(EngineError, match="engine-3: Ray's process raylet has ended"):
        Launcher(60).launch(3)
    with pytest.raises(GetTimeoutError, match="no result after 0 s"):
        Launcher(0)._launch(3)


def test_an_answer_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(
        wait=lambda waited, timeout: (waited, []), get=lambda waited: [f"the {name}" for name in waited]
    )
    monkeypatch.setattr(engine_actors, "ray", ray)
    assert Launcher(60).launch(3) == "the answer"


def test_no_host_is_requested_of_a_ray_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_ray() -> None:
        raise LearnerError("Ray's process gcs_server has ended")

    def remote(actor: object) -> Any:
        raise AssertionError("Ray might not return")

    monkeypatch.setattr(engine_actors, "check_ray", check_ray)
    monkeypatch.setattr(engine_actors, "ray", SimpleNamespace(remote=remote))
    launcher: Any = RayLauncher.__new__(RayLauncher)
    launcher._lock, launcher._hosts = threading.Lock(), {}
    launcher._spec = SimpleNamespace(config=SamplerConfig())
    with pytest.raises(LearnerError, match="gcs_server has ended"):
        launcher._find_hosts(0)
