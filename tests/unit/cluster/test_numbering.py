"""Ranks that work together are on one machine, wherever Ray has put the bundles."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest

from agentrl.cluster.placement_layout import GpuIndex, Layout, lay_out, number_by_machine
from agentrl.config.load import validate

GAE = {"algo": {"advantage": {"name": "gae"}}}


def layout_of(mode: str, ranks: int, engines: int, **sections: Any) -> Layout:
    """The layout of engines with four GPUs each."""
    sampler = {"backend": "sglang", "engines": engines, "sglang": {"tp_size": 4}}
    config = {"learner": {"ranks": ranks}, "placement": {"mode": mode}, "sampler": sampler} | sections
    return lay_out(validate(config, []), "cuda")


def filled(layout: Layout, free: Sequence[int], seed: int) -> dict[int, str]:
    """Put the bundles on machines with ``free`` GPUs in a random order."""
    left, machines = [*free], dict[int, str]()
    bundles = [*range(len(layout.bundles))]
    random.Random(seed).shuffle(bundles)
    for bundle in sorted(bundles, key=lambda bundle: -layout.bundles[bundle].get("GPU", 0)):
        fitting = [number for number, gpus in enumerate(left) if gpus >= layout.bundles[bundle].get("GPU", 0)]
        machine = random.Random(seed + bundle).choice(fitting)
        left[machine] -= layout.bundles[bundle].get("GPU", 0)
        machines[bundle] = f"machine-{machine}"
    return machines


def split(layout: Layout, machines: Mapping[int, str], size: int) -> int:
    """How many groups of adjacent ranks are on several machines."""
    by_rank = [machines[bundle] for bundle in layout.ranks]
    return sum(len({*by_rank[first : first + size]}) > 1 for first in range(0, len(by_rank), size))


@pytest.mark.parametrize("seed", range(20))
def test_on_four_machines_of_eight_gpus_no_group_of_eight_and_no_pair_is_split(seed: int) -> None:
    layout = layout_of("disaggregate", 32, 1)
    gpus = [f"machine-{number % 4}" for number in range(32)]
    random.Random(seed).shuffle(gpus)
    machines = dict(zip(layout.ranks, gpus, strict=True)) | {layout.engines[0][0]: "machine-4"}
    numbered = number_by_machine(layout, machines)
    assert sorted(numbered.ranks) == sorted(layout.ranks)
    assert split(layout, machines, 8) == 4, "as the bundles are numbered"
    assert [split(numbered, machines, size) for size in (2, 4, 8)] == [0, 0, 0]


def test_full_machines_come_first() -> None:
    layout = layout_of("disaggregate", 12, 1)
    machines = dict(enumerate(["a"] * 4 + ["b"] * 8 + ["a"]))
    numbered = number_by_machine(layout, machines)
    assert [machines[bundle] for bundle in numbered.ranks] == ["b"] * 8 + ["a"] * 4
    assert split(layout, machines, 8) == 1
    assert split(numbered, machines, 8) == 0


@pytest.mark.parametrize("seed", range(20))
def test_full_machines_hold_whole_groups(seed: int) -> None:
    layout = layout_of("colocate", 32, 8)
    machines = filled(layout, (8, 8, 8, 8), seed)
    numbered = number_by_machine(layout, machines)
    assert [split(numbered, machines, size) for size in (2, 4, 8)] == [0, 0, 0]
    for engine, [bundle] in enumerate(numbered.engines):
        assert numbered.ranks[4 * engine : 4 * engine + 4] == (bundle,) * 4, "an engine shares the GPUs of its ranks"


@pytest.mark.parametrize("seed", range(20))
def test_the_bundles_of_an_engine_of_two_machines_are_those_of_its_ranks(seed: int) -> None:
    layout = layout_of(
        "colocate", 32, 4, sampler={"backend": "sglang", "engines": 4, "sglang": {"tp_size": 8, "nnodes": 2}}
    )
    machines = filled(layout, (8, 8, 8, 8), seed)
    numbered = number_by_machine(layout, machines)
    assert [split(numbered, machines, size) for size in (2, 4, 8)] == [0, 0, 0]
    for engine, bundles in enumerate(numbered.engines):
        assert numbered.ranks[8 * engine : 8 * engine + 8] == (bundles[0],) * 4 + (bundles[1],) * 4


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_on_a_machine_ranks_and_engines_are_in_the_order_of_its_gpus(mode: str, seed: int) -> None:
    layout = layout_of(mode, 32, 8 if mode == "colocate" else 1, **GAE)
    machines = filled(layout, (8, 8, 8, 8) if mode == "colocate" else (20, 20, 20, 20), seed)
    first_gpus, random_order = dict[int, GpuIndex](), random.Random(seed)
    for machine in {*machines.values()}:
        bundles = [bundle for bundle in layout.ranks + layout.critics if machines[bundle] == machine]
        indices = random_order.sample(range(20), 20)
        first_gpus |= {bundle: (len(str(index)), str(index)) for bundle, index in zip(bundles, indices, strict=False)}
    numbered = number_by_machine(layout, machines, first_gpus)
    for bundles in (numbered.ranks, numbered.critics):
        for machine in {*machines.values()}:
            indices = [int(first_gpus[bundle][1]) for bundle in bundles if machines[bundle] == machine]
            assert indices == sorted(indices)
        assert len({*bundles}) == (32 if mode == "disaggregate" else 8)
    assert split(numbered, machines, 4) <= split(number_by_machine(layout, machines), machines, 4)
    if mode == "colocate":
        for engine, [bundle] in enumerate(numbered.engines):
            assert numbered.ranks[4 * engine : 4 * engine + 4] == (bundle,) * 4


@pytest.mark.parametrize("mode", ["colocate", "disaggregate"])
def test_a_critic_is_numbered_too(mode: str) -> None:
    layout = layout_of(mode, 8, 1, **GAE)
    machines = filled(layout, (8, 8, 8), 1)
    numbered = number_by_machine(layout, machines)
    assert sorted(numbered.critics) == sorted(layout.critics)
    by_rank = [machines[bundle] for bundle in numbered.critics]
    assert len([pair for pair in pairwise(by_rank) if pair[0] != pair[1]]) == len({*by_rank}) - 1
    if mode == "colocate":
        assert numbered.critics == numbered.ranks
