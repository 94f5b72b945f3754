"""Which parts of a machine or a cluster a configuration asks for."""

from __future__ import annotations

import pytest

from agentrl.cluster import placement_layout as placing
from agentrl.cluster.placement_layout import check_placement, describe_placement, lay_out
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, MissingError

SGLANG = "sampler.backend=sglang"
TP2 = "sampler.sglang.tp_size=2"


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ([], 1),
        ([TP2], 1),  # the embedded engine does not look at it
        ([SGLANG], 1),
        ([SGLANG, TP2], 2),
        ([SGLANG, "sampler.sglang.tensor-parallel-size=4", "sampler.sglang.pp=2"], 8),
        ([SGLANG, TP2, "sampler.sglang.data_parallel_size=3"], 6),
        ([SGLANG, "sampler.sglang.tp=8", "sampler.sglang.dp_size=4", "sampler.sglang.enable_dp_attention=true"], 8),
    ],
)
def test_the_gpus_of_an_engine(settings: list[str], ranks: int) -> None:
    assert load_config(None, settings).sampler.engine_ranks == ranks


def test_a_size_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sampler\.sglang\.tp_size='two'"):
        load_config(None, [SGLANG, "sampler.sglang.tp_size=two"])


def test_engines_in_turns_with_the_learner_lie_in_its_bundles() -> None:
    """Two engines of two ranks on five ranks of the learner: the last has a bundle of its own."""
    settings = [SGLANG, TP2, "sampler.engines=2", "learner.ranks=5", "placement.mode=colocate"]
    layout = lay_out(load_config(None, settings), "cuda")
    pair, single = {"CPU": 2, "GPU": 2}, {"CPU": 1, "GPU": 1}
    assert layout.bundles == (pair, pair, single)
    assert layout.ranks == (0, 0, 1, 1, 2)
    assert layout.engines == ((0,), (1,))
    assert (layout.rank_needs, layout.shares_engines) == (single, True)
    assert layout.total == {"CPU": 5, "GPU": 5}
    described = describe_placement(load_config(None, settings))
    assert described == "colocate: 5 for the learner, in turns with 2 engines of 2"


def test_engines_apart_from_the_learner_have_bundles_of_their_own() -> None:
    settings = [SGLANG, TP2, "sampler.engines=2", "learner.ranks=3", "placement.mode=disaggregate"]
    layout = lay_out(load_config(None, settings), "cuda")
    assert layout.bundles == ({"CPU": 1, "GPU": 1},) * 3 + ({"GPU": 2},) * 2
    assert (layout.ranks, layout.engines) == ((0, 1, 2), ((3,), (4,)))
    assert not layout.shares_engines
    assert describe_placement(load_config(None, settings)) == "disaggregate: 3 for the learner, and 2 engines of 2"
    on_cpu = lay_out(load_config(None, ["sampler.engines=2", "placement.mode=disaggregate"]), "cpu")
    assert on_cpu.bundles == ({"CPU": 1},) * 3


@pytest.mark.parametrize(
    ("mode", "bundles", "critics"),
    [
        ("colocate", ({"CPU": 4, "GPU": 2}, {"CPU": 2, "GPU": 1}), (0, 0, 1)),
        ("disaggregate", ({"CPU": 1, "GPU": 1},) * 3 + ({"GPU": 2},) + ({"CPU": 1, "GPU": 1},) * 3, (4, 5, 6)),
    ],
)
def test_ranks_of_a_critic_share_the_gpus_of_the_policys_or_have_their_own(
    mode: str, bundles: tuple[dict[str, int], ...], critics: tuple[int, ...]
) -> None:
    settings = [SGLANG, TP2, "learner.ranks=3", f"placement.mode={mode}", "algo.advantage.name=gae"]
    layout = lay_out(load_config(None, settings), "cuda")
    assert (layout.bundles, layout.critics) == (bundles, critics)
    assert layout.critic_needs == {"CPU": 1, "GPU": int(mode == "disaggregate")}
    assert "critic" in describe_placement(load_config(None, settings))
    on_cpu = lay_out(load_config(None, [*settings, "sampler.backend=embedded"]), "cpu")
    assert on_cpu.total == {"CPU": 6 if mode == "colocate" else 7}


def test_an_engine_of_several_machines_has_a_bundle_on_each() -> None:
    two = [SGLANG, "sampler.sglang={tp_size: 4, nnodes: 2}", "sampler.engines=2"]
    layout = lay_out(load_config(None, [*two, "placement.mode=colocate", "learner.ranks=9"]), "cuda")
    assert layout.engines == ((0, 1), (2, 3))
    assert layout.ranks == (0, 0, 1, 1, 2, 2, 3, 3, 4)
    assert [bundle["GPU"] for bundle in layout.bundles] == [2, 2, 2, 2, 1]
    layout = lay_out(load_config(None, [*two, "placement.mode=disaggregate", "learner.ranks=3"]), "cuda")
    assert layout.engines == ((3, 4), (5, 6))
    assert [bundle["GPU"] for bundle in layout.bundles] == [1, 1, 1, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampler.sglang={tp_size: 4, nnodes: 3}"], r"nnodes=3 does not divide the 4 GPUs of an engine"),
        (
            ["sampler.sglang={tp_size: 4, nnodes: 2}", "placement.mode=separate"],
            r"nnodes=2 with placement\.mode=separate",
        ),
        (["sampler.sglang={tp_size: 4, nnodes: 2}", "sampler.keep_minutes=5"], r"nnodes=2 with sampler\.keep_minutes"),
    ],
)
def test_machines_that_an_engine_cannot_have_are_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_placement(load_config(None, [SGLANG, "placement.mode=disaggregate", *settings]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["sampler.url=http://10.0.0.1:30000"], r"placement\.mode=colocate with sampler\.url=http://10.*leave out"),
        (["sampler.engines=3", "learner.ranks=2"], r"sampler\.engines=3 of 1 .*learner\.ranks=2; set sampler\.engines=2"),
        ([SGLANG, "sampler.sglang.device=cpu", "sampler.sglang.tp_size=2"],
         r"sampler\.engines=1 of 2 .*learner\.ranks=1; set sampler\.engines=1, and a smaller sampler\.sglang\.tp_size"),
        ([SGLANG], r"the learner is on cpu, the engines are on cuda; set learner\.device"),
    ],
)  # fmt: skip
def test_what_cannot_share_is_refused(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_placement(load_config(None, ["placement.mode=colocate", "learner.device=cpu", *settings]))


def test_an_engine_that_may_keep_its_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # its GPUs are not counted here
    settings = [SGLANG, "placement.mode=colocate", "learner.device=cuda"]
    check_placement(load_config(None, settings))
    with pytest.raises(ConfigError, match=r"sampler\.sglang\.enable_memory_saver=false: .*leave it out"):
        check_placement(load_config(None, [*settings, "sampler.sglang.enable_memory_saver=false"]))


def test_ipc_without_time_sharing_wants_one_gpu_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [SGLANG, "weights.transport=ipc", "placement.mode=separate", "learner.device=cuda", "sampler.engines=2"]
    monkeypatch.setattr(placing, "running_address", lambda: None)
    monkeypatch.setattr(placing, "gpus_here", lambda: 1)
    check_placement(load_config(None, settings))
    monkeypatch.setattr(placing, "gpus_here", lambda: 2)
    with pytest.raises(
        ConfigError, match=r"there are 2 GPUs here.*CUDA_VISIBLE_DEVICES.*weights\.transport=distributed"
    ):
        check_placement(load_config(None, settings))
    check_placement(load_config(None, [*settings, "weights.transport=distributed"]))
    monkeypatch.setattr(placing, "gpus_here", lambda: 1)
    monkeypatch.setattr(placing, "running_address", lambda: "10.0.0.1:6379")
    with pytest.raises(ConfigError, match=r"the running Ray at 10\.0\.0\.1:6379 may place the learner on another GPU"):
        check_placement(load_config(None, settings))


def test_too_few_gpus_are_named_unless_a_cluster_may_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(placing, "gpus_here", lambda: 4)
    monkeypatch.setattr(placing, "running_address", lambda: None)
    monkeypatch.setattr(placing, "learner_device", lambda learner: "cuda")
    settings = [SGLANG, TP2, "learner.ranks=2", "placement.mode=disaggregate"]
    check_placement(load_config(None, settings))
    with pytest.raises(
        MissingError, match=r"wants 6 GPUs .*ranks=2 .*engines=2 of 2 each; there are 4 here, and no Ray"
    ):
        check_placement(load_config(None, [*settings, "sampler.engines=2"]))
    for device in ("cuda", "auto"):
        with pytest.raises(
            MissingError,
            match=rf"learner\.device={device} .*ranks=3 wants as many GPUs for the policy and as many for its critic; there are "
            r"4 here, or set placement\.mode=colocate",
        ):
            check_placement(
                load_config(None, [f"learner.device={device}", "learner.ranks=3", "algo.advantage.name=gae"])
            )
    with pytest.raises(MissingError, match=r"learner\.ranks=5 wants as many GPUs; there are 4 here"):
        check_placement(load_config(None, ["learner.ranks=5", "learner.device=cuda"]))
    monkeypatch.setattr(placing, "running_address", lambda: "10.0.0.1:6379")
    check_placement(load_config(None, [*settings, "sampler.engines=2"]))
    check_placement(load_config(None, ["learner.ranks=5", "learner.device=cuda"]))
