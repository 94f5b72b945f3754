"""Where the engines of judges are: on the GPUs of the learner or of the policy's engines, or on further ones."""

import pytest

from agentrl.cluster import placement_layout
from agentrl.cluster.engine_actors import OwnLocations, SharedLocations
from agentrl.cluster.placement_group import ActorLocation
from agentrl.cluster.placement_layout import check_placement, describe_placement, lay_out
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError


def configured(*settings: str, judge: str = "") -> Config:
    fixed = ["sampler.backend=sglang", "learner.device=cuda", "reward=judge", f"reward.judge={{model: big{judge}}}"]
    return load_config(None, [*fixed, *settings])


def test_shared_judges_reserve_nothing_and_own_ones_have_bundles_of_their_own() -> None:
    colocated = ["placement.mode=colocate", "learner.ranks=4", "sampler.engines=2", "sampler.sglang.tp_size=2"]
    shared = lay_out(configured(*colocated, judge=", sglang: {tp_size: 4}"), "cuda")
    assert (shared.bundles, shared.judges) == (({"CPU": 2, "GPU": 2},) * 2, {})
    own = lay_out(configured(*colocated, judge=", sglang: {tp_size: 1}, gpus: own, engines: 3"), "cuda")
    assert own.bundles[2:] == ({"GPU": 1},) * 3
    assert (own.judges, own.judge_needs, own.total["GPU"]) == ({"big": (2, 3, 4)}, {"big": {"GPU": 1}}, 7)
    assert [OwnLocations([[2], [3], [4]], own.judge_needs["big"]).place(engine, 0) for engine in range(3)] == [
        (2, {"GPU": 1}),
        (3, {"GPU": 1}),
        (4, {"GPU": 1}),
    ]
    apart = lay_out(configured("placement.mode=disaggregate", "learner.ranks=2", judge=", gpus: own"), "cuda")
    assert apart.bundles[apart.judges["big"][0]] == {"GPU": 1}
    assert apart.total["GPU"] == 4
    on_cpus = lay_out(load_config(None, ["placement.mode=disaggregate", "reward=judge",
                                         "reward.judge={model: small, gpus: own, max_new_tokens: 9}"]), "cpu")  # fmt: skip
    assert on_cpus.judge_needs == {"small": {"CPU": 1}}


def test_an_engine_has_the_next_gpus_of_one_machine() -> None:
    ranks = [(0, ActorLocation("a", ("0",))), (0, ActorLocation("a", ("1",))), (1, ActorLocation("b", ("0",)))]
    one = SharedLocations("reward.judge", 1, lambda: ranks)
    assert [(one.place(engine, 0), one.gpus(engine, 0)) for engine in range(3)] == [
        ((0, {}), ("0",)), ((0, {}), ("1",)), ((1, {}), ("0",)),
    ]  # fmt: skip
    two = SharedLocations("reward.judge", 2, lambda: ranks)
    assert (two.place(0, 0), two.gpus(0, 0)) == ((0, {}), ("0", "1"))
    engines = [(2, ActorLocation("a", ("4", "5"))), (3, ActorLocation("b", ("0", "1")))]
    assert SharedLocations("reward.judge", 1, lambda: engines).gpus(1, 0) == ("5",)
    with pytest.raises(
        ConfigError, match=r"engine 1 of reward\.judge would have GPUs of several machines; set reward\.judge"
    ):
        SharedLocations("reward.judge", 2, lambda: [*ranks[:1], *engines]).gpus(1, 0)
    without_gpus = SharedLocations("reward.judge", 1, lambda: [(5, ActorLocation("a", ()))])
    assert (without_gpus.place(1, 0), without_gpus.gpus(1, 0)) == ((5, {}), ())


def test_judges_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_layout, "gpus_here", lambda: 2)
    monkeypatch.setattr(placement_layout, "learner_device", lambda learner: "cuda")
    colocated = ["placement.mode=colocate", "learner.ranks=2", "weights.transport=ipc"]
    check_placement(configured(*colocated, judge=", engines: 2"))
    with pytest.raises(
        ConfigError, match=r"reward\.judge\.engines=3 of 1 GPUs each do not fit on the 2 .* raise learner\.ranks"
    ):
        check_placement(configured(*colocated, judge=", engines: 3"))
    with pytest.raises(ConfigError, match=r"on the 1 .* raise sampler\.engines"):
        check_placement(configured("placement.mode=disaggregate", judge=", engines: 2"))
    with pytest.raises(MissingError, match=r"wants 3 GPUs .*, and 1 for judges \(judge\.gpus=own\); there are 2 here"):
        check_placement(configured(*colocated, judge=", gpus: own"))
    assert describe_placement(configured(*colocated)).endswith("1 engine of 1, in turns with engines of big")
    assert describe_placement(configured(*colocated, judge=", gpus: own")).endswith("and 1 for judges (judge.gpus=own)")
