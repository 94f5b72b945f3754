"""A Ray of four machines with eight GPUs each that only Ray believes in: which ranks are on one machine."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from agentrl.cluster.placement_group import ReservedPlacement, actor_location
from agentrl.cluster.placement_layout import lay_out
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.config.load import validate

pytestmark = pytest.mark.long

RANKS = 32


@pytest.fixture(scope="module")
def four_machines(forked_workers: None) -> Iterator[None]:
    folder = tempfile.mkdtemp(prefix="agentrl-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        cluster, small = Cluster(), {"object_store_memory": 80 << 20, "include_dashboard": False}
        cluster.add_node(num_cpus=0, num_gpus=0, **small)
        for number in range(4):
            cluster.add_node(node_ip_address=f"127.0.0.{number + 2}", num_cpus=16, num_gpus=8, **small)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield
        cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def whole(machines: Sequence[str], size: int) -> int:
    """How many groups of adjacent ranks are on one machine."""
    return sum(len({*machines[first : first + size]}) == 1 for first in range(0, RANKS, size))


class Idle:
    """Holds the GPU of a rank."""


def reserve(mode: str) -> ReservedPlacement:
    sampler = (
        {"backend": "sglang", "engines": 8, "sglang": {"tp_size": 4}}
        if mode == "colocate"
        else {"backend": "embedded", "engines": 2}
    )
    config = validate({"learner": {"ranks": RANKS}, "placement": {"mode": mode}, "sampler": sampler}, [])
    layout = lay_out(config, "cuda")
    runtime = RayRuntime(cpus=layout.total["CPU"], store_bytes=80 << 20)
    return ReservedPlacement.reserve(layout, runtime, 120.0, lambda cores: False, threading.Event())


@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_groups_of_eight_and_pairs_are_on_one_machine(four_machines: None, mode: str) -> None:
    placement = reserve(mode)
    try:
        assert len({*placement.machines}) == 4
        assert (whole(placement.machines, 8), whole(placement.machines, 2)) == (4, 16)
    finally:
        placement.close()


@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_on_each_machine_ranks_are_numbered_by_gpu(four_machines: None, mode: str) -> None:
    """Actors are started from the last rank to the first, and Ray assigns the GPUs of a bundle in that order.

    A bundle has the four GPUs of a colocated engine, or that of a rank.
    """
    placement = reserve(mode)
    try:
        actor: Any = ray.remote(num_cpus=0, num_gpus=1)(Idle)
        actors = [actor.options(**placement.rank_options(rank)).remote() for rank in reversed(range(RANKS))][::-1]
        locations = ray.get([rank.__ray_call__.remote(actor_location) for rank in actors])
        by_rank = [locations[number] for number in placement.number_ranks(locations)]
        gpus = [(location.node, *location.gpus) for location in by_rank]
        nodes = list(dict.fromkeys(placement.machines))
        assert gpus == [(node, str(gpu)) for node in nodes for gpu in range(8)]
        if mode == "colocate":
            assert locations != by_rank
            for engine, [bundle] in enumerate(placement.layout.engines):
                assert placement.layout.ranks[4 * engine : 4 * engine + 4] == (bundle,) * 4
    finally:
        placement.close()
