"""Where engines are: what Ray is asked, and what is known without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.cluster import placement_group
from agentrl.cluster.placement_group import ActorLocation, ReservedPlacement
from agentrl.cluster.placement_layout import Layout
from agentrl.core.child_process import LOOPBACK


class Nodes:
    """The machines of a Ray, which answers only while it has its GCS."""

    def __init__(self, **machines: str) -> None:
        self.machines = machines
        self.lost = False

    def __call__(self) -> list[dict[str, Any]]:
        assert not self.lost, "Ray does not answer without its GCS"
        return [
            {
                "NodeID": node,
                "NodeManagerAddress": address,
                "Alive": node != "lost",
                "Resources": {"GPU": 1} if node == "bare" else {"CPU": 2},
            }
            for node, address in self.machines.items()
        ]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    nodes = Nodes(a="10.0.0.1", b="10.0.0.2")
    monkeypatch.setattr(placement_group.ray, "nodes", nodes)
    monkeypatch.setattr(placement_group.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "a"))
    return nodes


def place(monkeypatch: pytest.MonkeyPatch, *bundles: str, has_runners: bool = False) -> ReservedPlacement:
    table = {"bundles_to_node_id": dict(enumerate(bundles))}
    monkeypatch.setattr(placement_group, "placement_group_table", lambda group: table)
    nothing: Any = None
    return ReservedPlacement(Layout((), (), (), {}, {}), nothing, nothing, lambda cores: has_runners)


def test_an_engine_is_started_again_without_the_gcs_as_far_as_its_address(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hung in `ray.nodes`, which waits for a GCS that has ended."""
    placement = place(monkeypatch, "a", "b")
    nodes.lost = True
    assert [placement.address(ActorLocation(node, ())) for node in "ab"] == ["10.0.0.1", "10.0.0.2"]


def test_a_run_on_one_machine_uses_the_loopback_address(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(monkeypatch, "a", "a")
    assert placement.address(ActorLocation("a", ())) == LOOPBACK


def test_a_machine_that_has_joined_since_is_known(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    placement = place(monkeypatch, "a", "b")
    nodes.machines["c"] = "10.0.0.3"
    assert placement.address(ActorLocation("c", ())) == "10.0.0.3"


def test_runners_on_other_machines_reach_engines_on_this_one(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.machines |= {"lost": "10.0.0.3", "bare": "10.0.0.4"}
    placement = place(monkeypatch, "a", has_runners=True)
    assert placement.runner_nodes() == ["a", "b"], "those that live and have CPUs"
    assert placement.spreads_runners
    assert placement.address(ActorLocation("a", ())) == "10.0.0.1"
    del nodes.machines["b"]
    alone = place(monkeypatch, "a", has_runners=True)
    assert not alone.spreads_runners
    assert alone.address(ActorLocation("a", ())) == LOOPBACK
